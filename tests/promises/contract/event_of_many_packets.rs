//! A packet of the binary log's stream holds 16 MiB less one byte. A larger event goes on in the next packet, and one that
//! fills its last packet exactly is followed by an empty one.

use crate::support::{LogPosition, Outbox, PATIENCE, PrivateMySql, Source, Topic, mysql_session};

const PACKET: u64 = 0xff_ffff;

/// The bytes of the stream that are not in the log: each event comes behind one.
const STATUS: u64 = 1;

promised!(event_of_many_packets_is_read_whole to mysql, mariadb);

async fn event_of_many_packets_is_read_whole(source: Source) {
    // Of its own: whoever reads this log must hold these events.
    let server = PrivateMySql::start(source.flavor(), &["--max-allowed-packet=64M"]).await;
    let outbox = Outbox::create_at(source, &server.url()).await;
    // What is wanted lies behind what is large.
    outbox.make_table("id BIGINT, note LONGBLOB, partition_key VARCHAR(20), payload LONGTEXT").await;
    let topic = Topic::create(1).await;
    let relay = outbox.streaming(&topic, &[]).await;
    let mut reader = topic.reader();

    // All that an event has beside the note.
    let around = STATUS + size_of_event(&outbox, 0).await;
    let mut notes = vec![0];
    for size in [PACKET - 1, PACKET, PACKET + 1, 2 * PACKET, 2 * PACKET + 7] {
        let note = size - around;
        assert_eq!(
            STATUS + size_of_event(&outbox, note).await,
            size,
            "a note of {note} bytes makes an event of its size"
        );
        notes.push(note);
    }
    let records = reader.take(notes.len()).await;
    let found: Vec<_> = records.iter().map(|record| (record.id().to_owned(), record.value.clone())).collect();
    let committed: Vec<_> = notes.iter().map(|note| (note.to_string(), Some(payload(*note)))).collect();
    assert_eq!(found, committed);
    outbox.until_confirmed(&outbox.end_of_log().await, PATIENCE).await;
    relay.stop().await;
}

/// Always of the same length.
fn payload(note: u64) -> String {
    format!("behind {note:08} bytes")
}

/// Inserts a row with so many bytes that nobody wants, and tells how long the event is that it is logged as.
async fn size_of_event(outbox: &Outbox, note: u64) -> u64 {
    let LogPosition::Binlog(before) = outbox.end_of_log().await else { panic!("there is a binary log") };
    let payload = payload(note);
    outbox.execute(&format!("INSERT INTO outbox VALUES ({note}, REPEAT('x', {note}), 'key', '{payload}')")).await;
    let mut session = mysql_session(&outbox.url()).await;
    let show = format!("SHOW BINLOG EVENTS IN '{}' FROM {}", before.file.file, before.file.offset);
    let events = session.query(&show).await.expect("the log is shown");
    // The third column is the type, the second the place. Where an event ends MariaDB 11.4 does not say.
    let rows = events.iter().position(|event| event.string(2).starts_with("Write_rows")).expect("rows were logged");
    events[rows + 1].number(1) - events[rows].number(1)
}
