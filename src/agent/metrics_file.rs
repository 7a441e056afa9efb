//! Writes an agent's metrics to a file in Prometheus' text format.
//!
//! The file is for hosts that cannot call the agent, such as NIXL, whose user sees the plug-in and not the agent in it.
//! A separate thread writes it, so that a hung disk delays no transfer.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use std::{fs, io, process};

use crate::agent::core::stats::{AgentStats, PeerStats};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::proto::ids::Incarnation;
use crate::proto::stats::{Row, prometheus};
use crate::sys::thread::spawn;

/// From one writing to the next. Prometheus asks every 15 seconds where nothing else is set.
const PERIOD: Duration = Duration::from_secs(5);

/// The thread that writes. It ends when this is dropped.
pub(crate) struct MetricsFile {
    stop: SyncSender<()>,
    /// Never gets anything; disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl MetricsFile {
    /// Writes the file, and starts the thread that does so again every 5 seconds. In `pattern`, `%p` stands for the process
    /// id and `%a` for the agent's name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for what is there and is no file, such as a device; [`ErrorKind::Io`] when the file
    /// cannot be written or the system refuses a thread; those of `figures`.
    pub(crate) fn start(
        pattern: &Path,
        (name, incarnation): (&str, Incarnation),
        figures: impl Fn() -> Result<(AgentStats, Vec<PeerStats>)> + Send + 'static,
    ) -> Result<MetricsFile> {
        let path = place(&expand(pattern, name))?;
        let made = PathBuf::from(format!("{}.{incarnation}", path.display()));
        let name = name.to_owned();
        let put = move || {
            let (agent, peers) = figures()?;
            replace(&path, &made, &text(&name, &agent, &peers)?).map_err(|e| unwritable(&path, &e))
        };
        put()?;
        let (stop, stopped) = sync_channel(1);
        let (alive, ended) = sync_channel(0);
        let run = move || {
            keep(&stopped, &put);
            drop::<SyncSender<()>>(alive);
        };
        spawn("kvf-metrics", run)
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

/// Writes every [`PERIOD`], and once more when it is over.
fn keep(stopped: &Receiver<()>, put: &impl Fn() -> Result<()>) {
    let mut limit = LogLimit::default();
    let mut is_over = false;
    while !is_over {
        is_over = stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout);
        match put() {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::ShutDown => return,
            Err(error) => {
                if let Some(left_out) = limit.pass(Instant::now()) {
                    log::warn!("{error} ({left_out} similar lines suppressed)");
                }
            }
        }
    }
}

fn text(name: &str, agent: &AgentStats, peers: &[PeerStats]) -> Result<String> {
    let map = |stats| match stats {
        Ok(serde_json::Value::Object(map)) => Ok(map),
        other => Err(Error::new(ErrorKind::Internal, format!("figures that are no map: {other:?}"))),
    };
    prometheus(&[Row {
        labels: BTreeMap::from([("agent".to_owned(), name.to_owned())]),
        agent: Some(map(serde_json::to_value(agent))?),
        peers: Some(peers.iter().map(|peer| map(serde_json::to_value(peer))).collect::<Result<_>>()?),
        ..Row::default()
    }])
}

/// Puts a whole new file at `path`, by way of `made`, so that no reader sees half of one.
fn replace(path: &Path, made: &Path, text: &str) -> io::Result<()> {
    let put = write_new(made, text).and_then(|()| fs::rename(made, path));
    if put.is_err() {
        // It may not have come into being.
        let _ = fs::remove_file(made);
    }
    put
}

/// Makes a file, in place of one that a killed process left there. A link of that name is removed, not followed: others
/// may write to the folder.
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    File::create_new(path)?.write_all(text.as_bytes())
}

/// Where a file of this path is, whatever folder the process is in later. A link is followed, since the file is replaced.
fn place(path: &Path) -> Result<PathBuf> {
    let found = match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::path::absolute(path),
        found => found,
    };
    let path = found.map_err(|e| unwritable(path, &e))?;
    if path.exists() && !path.is_file() {
        let text = format!("metrics_file {}: this is no file; give the path of one, which is replaced", path.display());
        return Err(Error::invalid(text));
    }
    Ok(path)
}

fn unwritable(path: &Path, error: &io::Error) -> Error {
    let path = path.display();
    let text = format!(
        "metrics_file {path}: it cannot be written ({error}); give a path in a folder that exists and is writable, and remove \
         what is there if it is another user's or no file"
    );
    Error::new(ErrorKind::Io, text)
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
    use std::os::unix::fs::symlink;

    use super::*;

    fn figures() -> Result<(AgentStats, Vec<PeerStats>)> {
        let peer = PeerStats { name: "b".to_owned(), copied_bytes: 9, ..PeerStats::default() };
        Ok((AgentStats { regions: 3, ..AgentStats::default() }, vec![peer]))
    }

    fn folder(name: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("kvferry-metrics-{name}-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn start(path: &Path, name: &str) -> Result<MetricsFile> {
        MetricsFile::start(path, (name, Incarnation(5)), figures)
    }

    #[test]
    fn the_file_is_there_at_once_and_alone() {
        let folder = folder("at-once");
        let long = Duration::from_secs(60);
        start(&folder.join("%a.prom"), "a/1 x").unwrap().end(long);
        let path = folder.join("a_1_x.prom");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("kvferry_agent_regions{agent=\"a/1 x\"} 3\n"), "{text}");
        assert!(text.contains("kvferry_peer_copied_bytes_total{agent=\"a/1 x\",peer=\"b\"} 9\n"), "{text}");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        // A link leads to the file that is written.
        symlink(&path, folder.join("link")).unwrap();
        start(&folder.join("link"), "b").unwrap().end(long);
        assert!(folder.join("link").is_symlink());
        assert!(fs::read_to_string(&path).unwrap().contains("{agent=\"b\"} 3\n"));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(expand(Path::new("/x/%p-%a"), "../é"), PathBuf::from(format!("/x/{}-.._é", process::id())));
    }

    #[test]
    fn failed_write_keeps_the_old_file() {
        let folder = folder("refused");
        let error = start(&folder, "a").err().unwrap();
        assert!(error.kind() == ErrorKind::InvalidArgument && folder.is_dir(), "{error}");
        let error = start(&folder.join("no/x"), "a").err().unwrap();
        assert!(error.kind() == ErrorKind::Io && error.message().contains("metrics_file"), "{error}");
        let (path, made) = (folder.join("x.prom"), folder.join("made"));
        // A folder stands where the new file is to be made, and then where it is to be put.
        fs::write(&path, "before").unwrap();
        fs::create_dir(&made).unwrap();
        assert!(replace(&path, &made, "new").is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "before");
        assert!(replace(&made, &path, "new").is_err());
        assert!(!path.exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
