//! What the kernel says of this process.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::gauge::ConstGauge,
};

/// What the kernel says of this process, read when asked.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let values = [
            ("process_resident_memory_bytes", "Memory in use", resident()),
            ("process_open_fds", "Open file descriptors", open_fds()),
        ];
        for (name, help, value) in values {
            // What cannot be read is left out, not shown as zero.
            if let Some(value) = value {
                let gauge = ConstGauge::new(value);
                gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
            }
        }
        Ok(())
    }
}

fn resident() -> Option<i64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    i64::try_from(pages * rustix::param::page_size() as u64).ok()
}

fn open_fds() -> Option<i64> {
    i64::try_from(std::fs::read_dir("/proc/self/fd").ok()?.count()).ok()
}
