//! Handing a record to librdkafka.
//!
//! The safe wrapper looks the topic up by name and copies it and every header's name into a C string of its own, for
//! each record. Here the topic is looked up once, and a header's name is passed by pointer and length.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use rdkafka::bindings as sys;
use rdkafka::error::{IsError, RDKafkaErrorCode};
use rdkafka::producer::{Producer, ThreadedProducer};

use super::context::ReceiptContext;
use crate::ack_window::Receipt;
use crate::route::Record;

/// A topic of one producer.
pub struct Topic {
    topic: *mut sys::rd_kafka_topic_t,
    /// The topic must be let go before its producer is.
    producer: Arc<ThreadedProducer<ReceiptContext>>,
}

// SAFETY: librdkafka's topics are counted references that any thread may use.
unsafe impl Send for Topic {}
// SAFETY: the same; `produce` is as thread-safe as librdkafka's own call.
unsafe impl Sync for Topic {}

/// The partitioner decides.
const BY_KEY: i32 = -1;

impl Topic {
    /// `None` for a name that holds a NUL, which routing never lets through, or that librdkafka does not take.
    pub fn new(producer: &Arc<ThreadedProducer<ReceiptContext>>, name: &str) -> Option<Self> {
        let name = CString::new(name).ok()?;
        // SAFETY: the client lives as long as `producer`; the name is copied; no configuration means the producer's.
        let topic = unsafe { sys::rd_kafka_topic_new(producer.client().native_ptr(), name.as_ptr(), ptr::null_mut()) };
        (!topic.is_null()).then(|| Topic { topic, producer: producer.clone() })
    }

    /// Enqueues the record, which is copied; its receipt comes back with its delivery report.
    pub fn produce(&self, record: &Record<'_>, receipt: Receipt) -> Result<(), RDKafkaErrorCode> {
        let (key, key_len) = parts(record.key);
        let (value, value_len) = parts(record.value);
        // SAFETY: all pointers live through the call, and MSG_F_COPY makes librdkafka keep none of them. The headers
        // are its own once it has taken the record, and ours to destroy when it has not.
        unsafe {
            let headers = sys::rd_kafka_headers_new(record.headers.len());
            for (name, value) in record.headers.iter() {
                let (value, value_len) = parts(value);
                let name_len = name.len() as isize;
                sys::rd_kafka_header_add(headers, name.as_ptr().cast(), name_len, value, value_len as isize);
            }
            let error = sys::rd_kafka_producev(
                self.producer.client().native_ptr(),
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_RKT,
                self.topic,
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_PARTITION,
                record.partition.unwrap_or(BY_KEY),
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_MSGFLAGS,
                sys::RD_KAFKA_MSG_F_COPY,
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_VALUE,
                value,
                value_len,
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_KEY,
                key,
                key_len,
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_OPAQUE,
                receipt.0 as *mut c_void,
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_TIMESTAMP,
                record.timestamp_millis,
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_HEADERS,
                headers,
                sys::rd_kafka_vtype_t::RD_KAFKA_VTYPE_END,
            );
            if error.is_error() {
                sys::rd_kafka_headers_destroy(headers);
                return Err(error.into());
            }
        }
        Ok(())
    }
}

impl Drop for Topic {
    fn drop(&mut self) {
        // SAFETY: this is the one reference that `new` was given.
        unsafe { sys::rd_kafka_topic_destroy(self.topic) };
    }
}

/// A null value differs from an empty one by its pointer.
fn parts(bytes: Option<&[u8]>) -> (*mut c_void, usize) {
    bytes.map_or((ptr::null_mut(), 0), |bytes| (bytes.as_ptr().cast_mut().cast(), bytes.len()))
}
