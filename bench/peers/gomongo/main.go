// Reads a MongoDB change stream with the Go driver and discards it: what an ordinary client makes of the same stream that
// outboxd relays. Prints one JSON object.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

func main() {
	source := flag.String("source", "", "")
	database := flag.String("database", "", "")
	from := flag.String("from", "", "cluster time, seconds:increment")
	rows := flag.Int("rows", 0, "ends with this many events")
	flag.Parse()

	ctx := context.Background()
	var begin bson.Timestamp
	_, err := fmt.Sscanf(*from, "%d:%d", &begin.T, &begin.I)
	check(err)
	client, err := mongo.Connect(options.Client().ApplyURI(*source))
	check(err)
	began := time.Now()
	settings := options.ChangeStream().SetStartAtOperationTime(&begin).SetBatchSize(10000)
	stream, err := client.Database(*database).Collection("outbox").Watch(ctx, mongo.Pipeline{}, settings)
	check(err)
	read := 0
	for read < *rows && stream.Next(ctx) {
		read++
	}
	check(stream.Err())
	wall := time.Since(began).Seconds()
	var usage syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
	check(json.NewEncoder(os.Stdout).Encode(map[string]any{
		"rows":         read,
		"wall_s":       wall,
		"rows_s":       float64(read) / wall,
		"cpu_s_per_m":  cpu / float64(read) * 1e6,
		"peak_rss_mib": float64(usage.Maxrss) / 1024,
	}))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "gomongo:", err)
		os.Exit(1)
	}
}
