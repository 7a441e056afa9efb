//! The request log: one JSON line per finished receive.

use std::fs::{File, OpenOptions};
use std::io::Write;

use serde::Serialize;

use super::writer::{Told, Writer};
use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::RankId;
use crate::proto::wire::RecvRecord;

/// Reports whose lines wait for the writer; those of more are left out, which the log tells.
const WAITING: usize = 4096;

/// An append-only file. The lines of a report are collected and written at once, so that ranks may share it.
pub(super) struct RequestLog {
    writer: Writer<Vec<u8>>,
    lines: Vec<u8>,
}

#[derive(Serialize)]
struct Line<'a> {
    request_id: &'a str,
    remote_request_id: &'a str,
    blocks: u64,
    bytes: u64,
    operations: u64,
    queued_us: u64,
    transfer_ms: f64,
    confirm_us: u64,
    cause: Option<&'a str>,
    pp_rank: u32,
    tp_rank: u32,
}

impl RequestLog {
    pub(super) fn open(path: &str) -> Result<RequestLog> {
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| {
            let text =
                format!("request_log {path:?} cannot be opened for appending ({e}); give a writable file's path");
            Error::new(ErrorKind::Io, text)
        })?;
        let path = path.to_owned();
        let writer =
            Writer::start("kvf-request-log", "the request log", WAITING, move |lines| write(file, &path, &lines))?;
        Ok(RequestLog { writer, lines: Vec::new() })
    }

    pub(super) fn add(&mut self, rank: RankId, record: &RecvRecord) {
        let line = Line {
            request_id: record.request.as_str(),
            remote_request_id: record.remote_request.as_str(),
            blocks: record.blocks,
            bytes: record.bytes,
            operations: record.operations,
            queued_us: record.queued_us,
            transfer_ms: record.transfer_us as f64 / 1e3,
            confirm_us: record.confirm_us,
            cause: record.cause.map(|c| c.name()),
            pp_rank: rank.pp,
            tp_rank: rank.tp,
        };
        let before = self.lines.len();
        match serde_json::to_writer(&mut self.lines, &line) {
            Ok(()) => self.lines.push(b'\n'),
            Err(_) => self.lines.truncate(before),
        }
    }

    /// Hands what was added to the thread that writes.
    pub(super) fn flush(&mut self) {
        if !self.lines.is_empty() {
            self.writer.tell(std::mem::take(&mut self.lines));
        }
    }
}

/// A file that cannot be written is reported once; transfers go on.
fn write(mut file: File, path: &str, lines: &Told<Vec<u8>>) {
    let mut failed = false;
    while let Ok(text) = lines.news.recv() {
        let left_out = lines.take_left_out();
        if left_out > 0 {
            log::warn!("kvferry: the request log {path:?} is written too slowly: {left_out} reports are not in it");
        }
        if let Err(e) = file.write_all(&text)
            && !std::mem::replace(&mut failed, true)
        {
            log::warn!("kvferry: the request log {path:?} cannot be written: {e}; its lines are lost");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::proto::ids::RequestId;
    use crate::proto::wire::Cause;

    #[test]
    fn lines_are_json_with_the_stated_keys() {
        let path = std::env::temp_dir().join(format!("kvferry-request-log-{}", std::process::id()));
        let mut log = RequestLog::open(path.to_str().unwrap()).unwrap();
        let mut record = RecvRecord {
            request: RequestId::new("a \"quoted\" name").unwrap(),
            remote_request: RequestId::new("b").unwrap(),
            blocks: 3,
            bytes: 4096,
            operations: 2,
            queued_us: 7,
            first_us: 1500,
            transfer_us: 1500,
            confirm_us: 9,
            cause: None,
        };
        log.add(RankId { pp: 1, tp: 2 }, &record);
        record.cause = Some(Cause::LeaseExpired);
        log.add(RankId { pp: 1, tp: 2 }, &record);
        log.flush();
        drop(log);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let expected = serde_json::json!({
            "request_id": "a \"quoted\" name", "remote_request_id": "b", "blocks": 3, "bytes": 4096, "operations": 2,
            "queued_us": 7, "transfer_ms": 1.5, "confirm_us": 9, "cause": null, "pp_rank": 1, "tp_rank": 2,
        });
        assert_eq!(lines.first(), Some(&expected));
        assert_eq!(lines.get(1).and_then(|l| l.get("cause")).and_then(|c| c.as_str()), Some("lease_expired"));
        let error = RequestLog::open("/no/such/directory/log").err().unwrap();
        assert!(error.message().contains("/no/such/directory/log"), "{error}");
    }

    #[test]
    fn a_file_that_takes_nothing_holds_up_nobody() {
        let path = std::env::temp_dir().join(format!("kvferry-request-pipe-{}", std::process::id()));
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        // Open for both, so that opening does not wait, and nobody ever reads.
        let reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut log = RequestLog::open(path.to_str().unwrap()).unwrap();
        for _ in 0..2 * WAITING {
            log.lines = vec![b'x'; 4096];
            log.flush();
        }
        std::fs::remove_file(&path).unwrap();
        // Otherwise the end waits for the last lines.
        drop(reader);
    }
}
