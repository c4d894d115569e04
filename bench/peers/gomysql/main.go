// Reads a MySQL binary log with go-mysql, decodes every row, and discards it: what an ordinary client makes of the same
// log that outboxd relays. Prints one JSON object.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/go-mysql-org/go-mysql/mysql"
	"github.com/go-mysql-org/go-mysql/replication"
)

func main() {
	host := flag.String("host", "127.0.0.1", "")
	port := flag.Uint("port", 3306, "")
	user := flag.String("user", "root", "")
	password := flag.String("password", "", "")
	from := flag.String("from", "", "GTIDs to begin after")
	rows := flag.Int("rows", 0, "ends with this many inserted rows")
	flag.Parse()

	syncer := replication.NewBinlogSyncer(replication.BinlogSyncerConfig{
		ServerID: uint32(os.Getpid()) | 1<<31,
		Flavor:   "mysql",
		Host:     *host,
		Port:     uint16(*port),
		User:     *user,
		Password: *password,
		Logger:   slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	set, err := mysql.ParseMysqlGTIDSet(*from)
	check(err)
	began := time.Now()
	stream, err := syncer.StartSyncGTID(set)
	check(err)
	read := 0
	for read < *rows {
		event, err := stream.GetEvent(context.Background())
		check(err)
		if inserted, ok := event.Event.(*replication.RowsEvent); ok {
			read += len(inserted.Rows)
		}
	}
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
		fmt.Fprintln(os.Stderr, "gomysql:", err)
		os.Exit(1)
	}
}
