//! The trace of a run: the lives of requests as a file in Chrome's trace event format, which Perfetto and
//! `chrome://tracing` open
//! (<https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>).
//!
//! The progress thread only hands over what happened; a thread of its own writes. The file is in the format's array form
//! with a line per event and no closing bracket, which the format allows, so that it is whole after every line.

use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::writer::{self, Writer};
use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::{EngineId, Incarnation, RankId};
use crate::proto::time::Time;
use crate::proto::worker::{ReceiveTrace, TraceEvent};

/// The environment variable that names the file where the configuration does not.
const VARIABLE: &str = "KVFERRY_TRACE";
/// Lives that wait for the writer; more are left out, and counted. About 4 MiB.
const WAITING: usize = 8192;
/// The longest text of a failure in the file, in bytes.
const MAX_MESSAGE: usize = 500;
/// Files that are tried for a name that is taken.
const MAX_NUMBER: u32 = 9999;
/// The bytes written at once, so that a file cut short nearly always ends with a whole line.
const BATCH_BYTES: usize = 32 << 10;
/// The rows of a process in a viewer, where they are called threads.
const RECVS: u32 = 1;
const SENDS: u32 = 2;

/// Whose trace it is.
pub(super) struct TraceSource {
    pub(super) name: String,
    pub(super) engine: EngineId,
    pub(super) rank: RankId,
    pub(super) incarnation: Incarnation,
}

/// A file that was made for a trace, before anything is known of whose it is.
pub(super) struct TraceFile {
    file: File,
    path: PathBuf,
}

/// The progress thread's end.
pub(super) struct Tracer {
    writer: Writer<TimedEvent>,
    /// Microseconds since 1970 at the origin of the times told.
    origin: u64,
}

struct TimedEvent {
    event: TraceEvent,
    /// When its report was given to the host.
    reported: Time,
    origin: u64,
}

impl TraceFile {
    /// Makes the file that `trace` names, else the environment variable `KVFERRY_TRACE`; an empty text is none. `%p` in it
    /// stands for the process id. A name that is taken gets a number: no file is ever written over. Where neither is
    /// given, `request_log` is taken for it, but stops no start: what it names may serve a log and not a trace.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when no file can be made there; [`ErrorKind::InvalidArgument`] for a variable that is no text.
    pub(super) fn configured(trace: Option<&str>, request_log: Option<&str>) -> Result<Option<TraceFile>> {
        Self::chosen(trace, env::var_os(VARIABLE), request_log, |text| log::warn!("kvferry: {text}"))
    }

    /// As [`TraceFile::configured`], with the variable's value.
    fn chosen(
        trace: Option<&str>,
        variable: Option<OsString>,
        request_log: Option<&str>,
        mut warn: impl FnMut(String),
    ) -> Result<Option<TraceFile>> {
        let request_log = request_log.filter(|path| !path.is_empty());
        let (key, path) = match (trace, variable.filter(|value| !value.is_empty())) {
            (Some(path), _) => ("trace", path.to_owned()),
            (None, Some(value)) => match value.into_string() {
                Ok(path) => (VARIABLE, path),
                Err(bytes) => {
                    return Err(Error::invalid(format!(
                        "{VARIABLE}={bytes:?} is no text in UTF-8; give a file's path"
                    )));
                }
            },
            (None, None) => return Ok(request_log.and_then(|path| Self::of_request_log(path, warn))),
        };
        if let Some(request_log) = request_log {
            warn(format!("request_log ({request_log}) has no effect beside {key}; leave it out"));
        }
        if path.is_empty() {
            return Ok(None);
        }
        let path = path.replace("%p", &process::id().to_string());
        Self::create(Path::new(&path)).map(Some).map_err(|e| {
            let text = format!(
                "{key} {path:?}: no file can be made there ({e}); give the path of a file to be made in a folder that exists \
                 and is writable"
            );
            Error::new(ErrorKind::Io, text)
        })
    }

    fn of_request_log(path: &str, mut warn: impl FnMut(String)) -> Option<TraceFile> {
        let path = path.replace("%p", &process::id().to_string());
        // Beside a device, a pipe or a folder of that name, nobody looks for a numbered file.
        let made = match std::fs::metadata(&path) {
            Ok(found) if !found.is_file() => Err("it is there and no regular file".to_owned()),
            _ => Self::create(Path::new(&path)).map_err(|e| e.to_string()),
        };
        let told = match &made {
            Ok(_) => "whose file has all that a request log had; set trace, and read the file with `kvferry trace`"
                .to_owned(),
            Err(why) => format!(
                "but no file can be made there ({why}), so there is no trace; set trace, or leave request_log out"
            ),
        };
        warn(format!("request_log ({path}) is taken for trace, {told}"));
        made.ok()
    }

    /// A new file at `path`, or at the first of its numbered names that is free.
    fn create(path: &Path) -> io::Result<TraceFile> {
        for number in 1..=MAX_NUMBER {
            let candidate = if number == 1 { path.to_owned() } else { numbered(path, number) };
            match OpenOptions::new().write(true).create_new(true).open(&candidate) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !candidate.is_dir() => {}
                Err(e) => return Err(e),
                Ok(file) => {
                    log::info!("kvferry: requests are traced to {}", candidate.display());
                    return Ok(TraceFile { file, path: candidate });
                }
            }
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("it and {MAX_NUMBER} numbered names exist")))
    }

    /// Starts the thread that writes.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when the system refuses a thread.
    pub(super) fn start(self, source: TraceSource) -> Result<Tracer> {
        let TraceFile { file, path } = self;
        let writer = Writer::start("kvf-trace", "the trace", WAITING, move |inbox| {
            TraceWriter { file, path, source, inbox }.run();
        })?;
        Ok(Tracer { writer, origin: 0 })
    }
}

/// `trace.json` becomes `trace.2.json`.
fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!(".{number}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

impl Tracer {
    /// States which instant is the origin of the times to be told.
    pub(super) fn set_origin(&mut self, epoch: Instant) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.origin = u64::try_from((since_1970.saturating_sub(epoch.elapsed())).as_micros()).unwrap_or(0);
    }

    /// Hands over what happened. Never waits: while the disk does not keep up, lives are left out.
    pub(super) fn record(&self, event: TraceEvent, reported: Time) {
        self.writer.send(TimedEvent { event, reported, origin: self.origin });
    }
}

/// The thread's part.
struct TraceWriter {
    file: File,
    path: PathBuf,
    source: TraceSource,
    inbox: writer::WriterInbox<TimedEvent>,
}

impl TraceWriter {
    fn run(mut self) {
        if let Err(e) = self.write() {
            // What was torn cannot be mended: a line more would be lost with it.
            log::warn!("kvferry: the trace {} cannot be written: {e}; it ends here", self.path.display());
            while self.inbox.receiver.recv().is_ok() {}
        }
    }

    fn write(&mut self) -> io::Result<()> {
        let mut out = EventLines { pid: process::id(), text: b"[\n".to_vec() };
        self.head(&mut out);
        self.file.write_all(&out.take())?;
        while let Ok(timed) = self.inbox.receiver.recv() {
            let mut next = Some(timed);
            while let Some(timed) = next {
                self.event(&mut out, timed);
                if out.text.len() >= BATCH_BYTES {
                    self.file.write_all(&out.take())?;
                }
                next = self.inbox.receiver.try_recv().ok();
            }
            let left_out = self.inbox.take_left_out();
            if left_out > 0 {
                out.line("i", RECVS, None, json!({"name": "left out", "s": "p", "args": {"left_out": left_out}}));
            }
            self.file.write_all(&out.take())?;
        }
        Ok(())
    }

    fn head(&self, out: &mut EventLines) {
        let TraceSource { name, engine, rank, incarnation } = &self.source;
        out.line("M", 0, None, json!({"name": "process_name", "args": {"name": name}}));
        let labels = format!("kvferry {}, rank {rank} of engine {engine}", env!("CARGO_PKG_VERSION"));
        out.line("M", 0, None, json!({"name": "process_labels", "args": {"labels": labels}}));
        let source = json!({
            "engine": engine, "pp_rank": rank.pp, "tp_rank": rank.tp, "incarnation": incarnation.to_string(),
            "version": env!("CARGO_PKG_VERSION"),
        });
        out.line("M", 0, None, json!({"name": "kvferry", "args": source}));
        for (tid, name) in [(RECVS, "receives"), (SENDS, "sends")] {
            out.line("M", tid, None, json!({"name": "thread_name", "args": {"name": name}}));
        }
    }

    /// The name of a request's events in all files of all processes.
    fn id(&self, what: impl std::fmt::Display) -> String {
        format!("{}/{what}", self.source.incarnation)
    }

    fn event(&self, out: &mut EventLines, timed: TimedEvent) {
        let TimedEvent { event, reported, origin } = timed;
        let at = |time: Time| Some(origin.saturating_add(time.0));
        match event {
            TraceEvent::RecvBegan { number, request, at: begin } => {
                let event = json!({
                    "cat": "recv", "id": self.id(number), "name": request.as_str(), "args": {"request": request},
                });
                out.line("b", RECVS, at(begin), event);
            }
            TraceEvent::RecvEnded { number, receive } => self.recv_ended(out, number, &receive, reported, origin),
            TraceEvent::RecvReleased { number, request, at: end } => {
                let args = json!({"outcome": "released"});
                let event = json!({"cat": "recv", "id": self.id(number), "name": request.as_str(), "args": args});
                out.line("e", RECVS, at(end), event);
            }
            TraceEvent::SendBegan { request, at: begin } => {
                let id = self.id(format_args!("send/{request}"));
                let event = json!({"cat": "send", "id": id, "name": request.as_str(), "args": {"request": request}});
                out.line("b", SENDS, at(begin), event);
            }
            TraceEvent::SendEnded { request, at: end, how } => {
                let id = self.id(format_args!("send/{request}"));
                let args = json!({"outcome": how.name()});
                out.line("e", SENDS, at(end), json!({"cat": "send", "id": id, "name": request.as_str(), "args": args}));
            }
        }
    }

    fn recv_ended(&self, out: &mut EventLines, number: u64, receive: &ReceiveTrace, reported: Time, origin: u64) {
        let ReceiveTrace {
            engine,
            known,
            queued,
            handshake,
            planned,
            posted,
            all_posted,
            last_byte,
            confirmed,
            over,
            chunks,
            record,
            message,
        } = receive;
        let id = self.id(number);
        let at = |time: Time| Some(origin.saturating_add(time.0));
        let mut stages = VecDeque::from([
            ("held", Some(*known).filter(|known| known < queued), Some(*queued)),
            ("queued", Some(*queued), planned.or(Some(*over))),
            ("planned", *planned, *posted),
            ("transfer", *posted, *last_byte),
            ("confirm", *last_byte, *confirmed),
            ("report", Some(*over), Some(reported)),
        ]);
        while let Some((name, begin, end)) = stages.pop_front() {
            let (Some(begin), Some(end)) = (begin, end) else { continue };
            out.line("b", RECVS, at(begin), json!({"cat": "recv", "id": id, "name": name}));
            if name == "transfer"
                && let Some(all_posted) = all_posted
            {
                out.line("b", RECVS, at(begin), json!({"cat": "recv", "id": id, "name": "posting"}));
                out.line("e", RECVS, at(*all_posted), json!({"cat": "recv", "id": id, "name": "posting"}));
            }
            out.line("e", RECVS, at(end), json!({"cat": "recv", "id": id, "name": name}));
        }
        // Over several connections they overlap.
        for (number, chunk) in chunks.iter().enumerate() {
            let own = format!("{id}/chunk/{number}");
            let args = json!({"tokens": [chunk.tokens.0, chunk.tokens.1], "bytes": chunk.bytes});
            out.line("b", RECVS, at(chunk.posted), json!({"cat": "chunk", "id": own, "name": "chunk", "args": args}));
            out.line("e", RECVS, at(chunk.over), json!({"cat": "chunk", "id": own, "name": "chunk"}));
        }
        // It may have begun before, for another request, and last through several stages of this one.
        if let Some((begin, connected)) = handshake {
            let own = format!("{id}/handshake");
            out.line("b", RECVS, at(*begin), json!({"cat": "handshake", "id": own, "name": "handshake"}));
            let end = connected.unwrap_or(*over);
            out.line("e", RECVS, at(end), json!({"cat": "handshake", "id": own, "name": "handshake"}));
        }
        let time = |time: Option<Time>| time.and_then(at);
        let args = json!({
            "outcome": record.cause.map_or("received", |cause| cause.name()),
            "message": message.as_deref().map(shortened),
            "remote_request": record.remote_request,
            "engine": engine,
            "bytes": record.bytes,
            "blocks": record.blocks,
            "operations": record.operations,
            "known": at(*known),
            "queued": at(*queued),
            "handshake": time(handshake.map(|(begin, _)| begin)),
            "connected": time(handshake.and_then(|(_, connected)| connected)),
            "planned": time(*planned),
            "posted": time(*posted),
            "all_posted": time(*all_posted),
            "last_byte": time(*last_byte),
            "confirmed": time(*confirmed),
            "reported": at(reported),
            "first_chunk": time(chunks.iter().map(|chunk| chunk.posted).min()),
            "chunks": chunks.len(),
            "ahead_bytes": chunks.iter().fold(0u64, |sum, chunk| sum.saturating_add(chunk.bytes)),
        });
        let event = json!({"cat": "recv", "id": id, "name": record.request.as_str(), "args": args});
        out.line("e", RECVS, at(reported), event);
    }
}

fn shortened(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_MESSAGE)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.get(..end).unwrap_or("")
}

struct EventLines {
    pid: u32,
    text: Vec<u8>,
}

impl EventLines {
    fn line(&mut self, phase: &str, tid: u32, ts: Option<u64>, mut event: Value) {
        if let Value::Object(fields) = &mut event {
            fields.insert("ph".to_owned(), phase.into());
            fields.insert("pid".to_owned(), self.pid.into());
            fields.insert("tid".to_owned(), tid.into());
            if let Some(ts) = ts {
                fields.insert("ts".to_owned(), ts.into());
            }
        }
        self.text.extend(event.to_string().into_bytes());
        self.text.extend(b",\n");
    }

    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.text)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::proto::ids::RequestId;
    use crate::proto::wire::{Cause, RecvRecord};
    use crate::proto::worker::{LeaseEnd, ReceivedChunk};

    fn folder(name: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("kvferry-trace-{name}-{}", process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn source() -> TraceSource {
        TraceSource {
            name: "a \"worker\"".to_owned(),
            engine: EngineId::new("e").unwrap(),
            rank: RankId { pp: 0, tp: 1 },
            incarnation: Incarnation(7),
        }
    }

    fn receive(request: &RequestId, cause: Option<Cause>) -> TraceEvent {
        let record = RecvRecord {
            request: request.clone(),
            remote_request: RequestId::new("p").unwrap(),
            blocks: 1,
            bytes: 2,
            operations: 3,
            queued_us: 0,
            first_us: 0,
            transfer_us: 0,
            confirm_us: 0,
            cause,
        };
        TraceEvent::RecvEnded {
            number: 4,
            receive: Box::new(ReceiveTrace {
                engine: EngineId::new("far").unwrap(),
                known: Time(10),
                queued: Time(20),
                handshake: Some((Time(10), Some(Time(30)))),
                planned: Some(Time(30)),
                posted: cause.is_none().then_some(Time(40)),
                all_posted: cause.is_none().then_some(Time(45)),
                last_byte: cause.is_none().then_some(Time(50)),
                confirmed: cause.is_none().then_some(Time(60)),
                over: Time(60),
                chunks: vec![ReceivedChunk { tokens: (0, 256), bytes: 77, posted: Time(12), over: Time(18) }],
                record,
                message: cause.map(|_| "why".repeat(1000)),
            }),
        }
    }

    /// The file's events; every line is one.
    fn events(path: &Path) -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        let lines = text.strip_prefix("[\n").unwrap().lines();
        lines.map(|line| serde_json::from_str(line.strip_suffix(',').unwrap()).unwrap()).collect()
    }

    #[test]
    fn a_name_that_is_taken_gets_a_number_and_a_folder_that_is_not_there_an_error() {
        let folder = folder("names");
        let pattern = folder.join("t-%p.json");
        let first = TraceFile::configured(pattern.to_str(), None).unwrap().unwrap();
        assert_eq!(first.path, folder.join(format!("t-{}.json", process::id())));
        std::fs::write(&first.path, "another's").unwrap();
        let second = TraceFile::configured(pattern.to_str(), None).unwrap().unwrap();
        assert_eq!(second.path, folder.join(format!("t-{}.2.json", process::id())));
        assert_eq!(std::fs::read_to_string(&first.path).unwrap(), "another's");
        for bad in [folder.join("none/t.json"), folder.clone(), PathBuf::from("/proc/t.json")] {
            let error = TraceFile::configured(bad.to_str(), None).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(error.message().contains("trace") && error.message().contains("folder that exists"), "{error}");
        }
        assert!(TraceFile::configured(Some(""), None).unwrap().is_none());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_request_log_is_taken_for_a_trace_where_none_is_given_and_stops_no_start() {
        let folder = folder("former");
        let in_folder = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let chosen = |trace: Option<&str>, variable: &str, request_log: &str| {
            let mut warnings = Vec::new();
            let warn = |text| warnings.push(text);
            let file = TraceFile::chosen(trace, Some(variable.into()), Some(request_log), warn).unwrap();
            (file.map(|file| file.path), warnings)
        };
        let (log, trace) = (in_folder("log"), in_folder("trace"));
        for (given, variable, key) in
            [(Some(&*trace), "", "trace"), (Some(""), &*trace, "trace"), (None, &*trace, VARIABLE)]
        {
            let (path, warnings) = chosen(given, variable, &log);
            assert_eq!(path.is_some(), given != Some(""));
            assert!(path.is_none_or(|path| path.starts_with(&folder) && path != Path::new(&log)));
            assert_eq!(warnings, [format!("request_log ({log}) has no effect beside {key}; leave it out")]);
        }
        assert_eq!(chosen(Some(""), "", ""), (None, Vec::new()));
        assert_eq!(chosen(None, "", ""), (None, Vec::new()));
        for made in [log.clone(), in_folder("log.2")] {
            let (path, warnings) = chosen(None, "", &log);
            assert_eq!(path.as_deref(), Some(Path::new(&made)));
            let [warning] = &warnings[..] else { panic!("{warnings:?}") };
            assert!(warning.starts_with(&format!("request_log ({log}) is taken for trace, whose")), "{warning}");
        }
        let socket = in_folder("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::create_dir(folder.join("folder")).unwrap();
        for no_file in
            [socket, in_folder("folder"), in_folder("none/log"), "/proc/log".to_owned(), "/dev/null".to_owned()]
        {
            let (path, warnings) = chosen(None, "", &no_file);
            assert_eq!(path, None);
            let [warning] = &warnings[..] else { panic!("{warnings:?}") };
            assert!(warning.contains(&no_file) && warning.contains("so there is no trace"), "{warning}");
        }
        let mut names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort_unstable();
        assert_eq!(names, ["folder", "log", "log.2", "socket", "trace", "trace.2"]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_the_writer_has_no_time_for_is_left_out_and_counted() {
        let folder = folder("left-out");
        let TraceFile { file, path } = TraceFile::configured(folder.join("t.json").to_str(), None).unwrap().unwrap();
        let (go, gate) = channel();
        let tale = path.clone();
        let writer = Writer::start("kvf-trace", "the trace", 2, move |inbox| {
            gate.recv().unwrap();
            TraceWriter { file, path: tale, source: source(), inbox }.run();
        });
        let tracer = Tracer { writer: writer.unwrap(), origin: 0 };
        let request = RequestId::new("r").unwrap();
        for number in 0..5 {
            tracer.record(TraceEvent::RecvBegan { number, request: request.clone(), at: Time(number) }, Time(number));
        }
        go.send(()).unwrap();
        drop(tracer);
        let events = events(&path);
        let counts: Vec<u64> = events.iter().filter_map(|e| e.pointer("/args/left_out")?.as_u64()).collect();
        assert_eq!((events.iter().filter(|e| e.get("ph").unwrap() == "b").count(), counts), (2, vec![3]));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_file_has_a_whole_life_in_whole_lines() {
        let folder = folder("life");
        let path = folder.join("t.json");
        let mut tracer = TraceFile::configured(path.to_str(), None).unwrap().unwrap().start(source()).unwrap();
        tracer.set_origin(Instant::now());
        let name = RequestId::new("</script>\"\\ \u{1F600}").unwrap();
        tracer.record(TraceEvent::RecvBegan { number: 4, request: name.clone(), at: Time(10) }, Time(10));
        tracer.record(receive(&name, None), Time(70));
        tracer.record(receive(&name, Some(Cause::Timeout)), Time(70));
        tracer.record(TraceEvent::RecvReleased { number: 5, request: name.clone(), at: Time(80) }, Time(80));
        tracer.record(TraceEvent::SendBegan { request: name.clone(), at: Time(1) }, Time(1));
        tracer.record(TraceEvent::SendEnded { request: name.clone(), at: Time(9), how: LeaseEnd::Expired }, Time(9));
        drop(tracer);
        let events = events(&path);
        let of = |phase: &str| events.iter().filter(|e| e.get("ph").unwrap() == phase).count();
        assert_eq!(of("M"), 5);
        // Began: the request, five stages and posting, a chunk, the handshake; of the failed one two stages, a chunk and the
        // handshake.
        assert_eq!((of("b"), of("e")), (1 + 8 + 1 + 4 + 1 + 1, 1 + 8 + 1 + 1 + 4 + 1 + 1 + 1));
        let ends: Vec<&Value> = events.iter().filter_map(|e| e.get("args")?.get("outcome")).collect();
        assert_eq!(ends, ["received", "timeout", "released", "expired"]);
        let ended = events.iter().find(|e| e.pointer("/args/outcome").is_some()).unwrap();
        assert_eq!(ended.get("name").unwrap().as_str(), Some(name.as_str()));
        let args = ended.get("args").unwrap();
        let span =
            |from: &str, to: &str| args.get(to).unwrap().as_u64().unwrap() - args.get(from).unwrap().as_u64().unwrap();
        assert_eq!((span("known", "queued"), span("posted", "last_byte"), span("queued", "reported")), (10, 10, 50));
        let text = events.iter().find_map(|e| e.pointer("/args/message")?.as_str()).unwrap();
        assert_eq!(text.len(), MAX_MESSAGE);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
