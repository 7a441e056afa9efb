//! A file with an agent's figures in Prometheus' text format, for who has no other way to them: NIXL's user sees the plug-in
//! and not the agent in it.
//!
//! A thread of its own writes it, so that a disk that hangs holds up no transfer.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use std::{fs, process, thread};

use crate::agent::core::stats::{AgentStats, PeerStats};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::proto::ids::Incarnation;
use crate::proto::stats::{Row, prometheus};

/// From one writing to the next. Prometheus asks every 15 seconds where nothing else is set.
const PERIOD: Duration = Duration::from_secs(5);

/// The thread that writes. It ends when this is dropped.
pub(crate) struct MetricsFile {
    stop: SyncSender<()>,
    /// Never gets anything; disconnected when the thread has ended.
    ended: Receiver<()>,
}

/// What is written, and where.
struct Target<F> {
    path: PathBuf,
    /// What is moved to `path` when it is whole.
    made: PathBuf,
    name: String,
    figures: F,
}

impl MetricsFile {
    /// Writes the file, and starts the thread that does so again every 5 seconds. In `pattern`, `%p` stands for the process
    /// id and `%a` for the agent's name.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when the file cannot be written or the system refuses a thread; those of `figures`.
    pub(crate) fn start(
        pattern: &Path,
        (name, incarnation): (&str, Incarnation),
        figures: impl Fn() -> Result<(AgentStats, Vec<PeerStats>)> + Send + 'static,
    ) -> Result<MetricsFile> {
        let path = place(&expand(pattern, name))?;
        let made = PathBuf::from(format!("{}.{incarnation}", path.display()));
        let target = Target { path, made, name: name.to_owned(), figures };
        target.write()?;
        let (stop, stopped) = sync_channel(1);
        let (alive, ended) = sync_channel(0);
        thread::Builder::new()
            .name("kvf-metrics".to_owned())
            .spawn(move || {
                target.keep(&stopped);
                drop::<SyncSender<()>>(alive);
            })
            .map_err(|e| Error::new(ErrorKind::Io, format!("starting the thread that writes metrics: {e}")))?;
        Ok(MetricsFile { stop, ended })
    }

    /// Has the last figures written and the thread end, waiting for that for at most `timeout`.
    pub(crate) fn end(self, timeout: Duration) {
        drop(self.stop);
        // Whether it took too long or not.
        let _ = self.ended.recv_timeout(timeout);
    }
}

impl<F: Fn() -> Result<(AgentStats, Vec<PeerStats>)>> Target<F> {
    fn keep(&self, stopped: &Receiver<()>) {
        let mut limit = LogLimit::default();
        loop {
            let is_over = stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout);
            match self.write() {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::ShutDown => return,
                Err(error) => {
                    if let Some(left_out) = limit.pass(Instant::now()) {
                        log::warn!("agent {}: {error} ({left_out} such lines left out)", self.name);
                    }
                }
            }
            if is_over {
                return;
            }
        }
    }

    fn write(&self) -> Result<()> {
        let (agent, peers) = (self.figures)()?;
        let map = |stats| match stats {
            Ok(serde_json::Value::Object(map)) => Ok(map),
            other => Err(Error::new(ErrorKind::Internal, format!("figures that are no map: {other:?}"))),
        };
        let row = Row {
            labels: BTreeMap::from([("agent".to_owned(), self.name.clone())]),
            agent: Some(map(serde_json::to_value(agent))?),
            peers: Some(peers.iter().map(|peer| map(serde_json::to_value(peer))).collect::<Result<_>>()?),
            ..Row::default()
        };
        let text = prometheus(&[row])?;
        let written = write_new(&self.made, text.as_bytes()).and_then(|()| fs::rename(&self.made, &self.path));
        written.map_err(|e| {
            // It may not have come into being.
            let _ = fs::remove_file(&self.made);
            unwritable(&self.path, &e)
        })
    }
}

/// Writes a file that was not there. What a write that was cut off has left is removed, and not followed if it is a link.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::create_new(path)?.write_all(bytes)
}

fn unwritable(path: &Path, error: &io::Error) -> Error {
    let path = path.display();
    let text = format!(
        "metrics_file {path}: it cannot be written ({error}); give a path in a folder that exists and is writable"
    );
    Error::new(ErrorKind::Io, text)
}

/// Where a file of this path is, whatever folder the process is in later. A link is followed once, since the file is replaced.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what is there and is no file, such as a device or a folder; [`ErrorKind::Io`] from the
/// system.
fn place(path: &Path) -> Result<PathBuf> {
    let path = match fs::canonicalize(path) {
        Ok(path) => path,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return std::path::absolute(path).map_err(|e| unwritable(path, &e));
        }
        Err(error) => return Err(unwritable(path, &error)),
    };
    if !fs::metadata(&path).is_ok_and(|found| found.is_file()) {
        let text = format!("metrics_file {}: this is no file; give the path of one, which is replaced", path.display());
        return Err(Error::invalid(text));
    }
    Ok(path)
}

/// The path that a pattern stands for. What is unusual in an agent's name, and a folder's end, becomes `_`.
fn expand(pattern: &Path, name: &str) -> PathBuf {
    let usual = |letter: char| letter.is_alphanumeric() || "-_.".contains(letter);
    let name: String = name.chars().map(|letter| if usual(letter) { letter } else { '_' }).collect();
    let pattern = pattern.to_string_lossy().replace("%p", &process::id().to_string());
    PathBuf::from(pattern.replace("%a", &name))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::env;

    use super::*;

    fn figures() -> Result<(AgentStats, Vec<PeerStats>)> {
        let peer = PeerStats { name: "b".to_owned(), copied_bytes: 9, ..PeerStats::default() };
        Ok((AgentStats { regions: 3, ..AgentStats::default() }, vec![peer]))
    }

    #[test]
    fn the_file_is_there_at_once_and_alone() {
        let folder = env::temp_dir().join(format!("kvferry-metrics-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = MetricsFile::start(&folder.join("%a.prom"), ("a/1 x", Incarnation(5)), figures).unwrap();
        file.end(Duration::from_secs(60));
        let text = fs::read_to_string(folder.join("a_1_x.prom")).unwrap();
        assert!(text.contains("kvferry_agent_regions{agent=\"a/1 x\"} 3\n"), "{text}");
        assert!(text.contains("kvferry_peer_copied_bytes_total{agent=\"a/1 x\",peer=\"b\"} 9\n"), "{text}");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        // What is no file stays, and a link leads to the file that is written.
        let error = MetricsFile::start(&folder, ("a", Incarnation(5)), figures).err().unwrap();
        assert!(error.kind() == ErrorKind::InvalidArgument && folder.is_dir(), "{error}");
        std::os::unix::fs::symlink(folder.join("a_1_x.prom"), folder.join("link")).unwrap();
        fs::write(folder.join("a_1_x.prom"), "old").unwrap();
        MetricsFile::start(&folder.join("link"), ("b", Incarnation(6)), figures).unwrap().end(Duration::from_secs(60));
        assert!(folder.join("link").is_symlink());
        assert!(fs::read_to_string(folder.join("a_1_x.prom")).unwrap().contains("{agent=\"b\"} 3\n"));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::remove_dir_all(&folder).unwrap();
        let error = MetricsFile::start(&folder.join("x"), ("a", Incarnation(5)), figures).err().unwrap();
        assert!(error.kind() == ErrorKind::Io && error.message().contains("metrics_file"), "{error}");
        assert_eq!(expand(Path::new("/x/%p-%a"), "../é"), PathBuf::from(format!("/x/{}-.._é", process::id())));
    }
}
