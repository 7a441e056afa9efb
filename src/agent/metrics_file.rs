//! A file with an agent's figures in Prometheus' text format, for who has no other way to them: NIXL's user sees the plug-in
//! and not the agent in it.
//!
//! A thread of its own writes it, so that a disk that hangs holds up no transfer.
//!
//! One agent writes a file: it holds a lock (`flock`) on it, which the kernel frees however the process ends. Each writing
//! puts a new file in the old one's place, locked before it gets there. So there is no lock file beside it, and a process that
//! was forked off and inherits the lock holds it until the next writing only, or, if there is none, until its own end.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use std::{fs, process};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::agent::core::stats::{AgentStats, PeerStats};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::proto::ids::Incarnation;
use crate::proto::stats::{Row, prometheus};
use crate::sys::thread::spawn;

/// From one writing to the next. Prometheus asks every 15 seconds where nothing else is set.
const PERIOD: Duration = Duration::from_secs(5);

/// How often a file that others replace or remove meanwhile is opened again.
const CLAIMS: u32 = 100;

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
    /// The file at `path` that was locked last.
    held: Option<File>,
    /// Whether that one is empty, made to be locked where there was none.
    is_empty: bool,
}

impl MetricsFile {
    /// Writes the file, and starts the thread that does so again every 5 seconds. In `pattern`, `%p` stands for the process
    /// id and `%a` for the agent's name.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] when another agent writes the file, in this process or another; [`ErrorKind::Io`] when
    /// it cannot be written or the system refuses a thread; those of `figures`.
    pub(crate) fn start(
        pattern: &Path,
        (name, incarnation): (&str, Incarnation),
        figures: impl Fn() -> Result<(AgentStats, Vec<PeerStats>)> + Send + 'static,
    ) -> Result<MetricsFile> {
        let path = place(&expand(pattern, name))?;
        let made = PathBuf::from(format!("{}.{incarnation}", path.display()));
        let mut target = Target { path, made, name: name.to_owned(), figures, held: None, is_empty: false };
        target.write()?;
        let (stop, stopped) = sync_channel(1);
        let (alive, ended) = sync_channel(0);
        let run = move || {
            target.keep(&stopped);
            // The lock is free when the end is known.
            drop(target);
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

impl<F: Fn() -> Result<(AgentStats, Vec<PeerStats>)>> Target<F> {
    fn keep(&mut self, stopped: &Receiver<()>) {
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

    fn write(&mut self) -> Result<()> {
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
        // Each time: whoever has removed the file may have left its place to another agent.
        self.claim()?;
        let put = |file: File| fs::rename(&self.made, &self.path).map(|()| file);
        match write_new(&self.made, text.as_bytes()).and_then(put) {
            Ok(file) => {
                (self.held, self.is_empty) = (Some(file), false);
                Ok(())
            }
            Err(e) => {
                // It may not have come into being.
                let _ = fs::remove_file(&self.made);
                self.remove_empty();
                Err(unwritable(&self.path, &e))
            }
        }
    }

    /// Locks the file that is at `path`, unless it is the one that is locked already; an empty one where there is none.
    fn claim(&mut self) -> Result<()> {
        for _ in 0..CLAIMS {
            match self.is_held() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(e) => return Err(unwritable(&self.path, &e)),
            }
            (self.held, self.is_empty) = (None, false);
            let (file, is_new) = match self.open() {
                // It was there a moment ago, and is not any more.
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.has_folder() => continue,
                opened => opened.map_err(|e| unwritable(&self.path, &e))?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Of this very file, if nobody has put another one there meanwhile.
                Ok(()) => (self.held, self.is_empty) = (Some(file), is_new),
                Err(Errno::WOULDBLOCK) => return Err(taken(&self.path)),
                Err(e) => return Err(unwritable(&self.path, &e.into())),
            }
        }
        Err(unwritable(&self.path, &io::Error::other("it is replaced again and again")))
    }

    /// Opens the file at `path`, and says whether it was made for that. Whoever comes second, of two that find none, finds it
    /// locked or locks it.
    fn open(&self) -> io::Result<(File, bool)> {
        let options = |write: bool| {
            let mut options = OpenOptions::new();
            options.read(!write).write(write).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
            options
        };
        match options(true).create_new(true).open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|file| (file, true)),
        }
        match options(true).open(&self.path) {
            // One that may be replaced though not written, such as another user's, is locked as well.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => options(false).open(&self.path),
            opened => opened,
        }
        .map(|file| (file, false))
    }

    fn has_folder(&self) -> bool {
        self.path.parent().is_some_and(Path::is_dir)
    }

    /// Removes the file that was made to be locked and that nothing could be put in the place of. Whoever waits for its lock
    /// finds that it is not there any more.
    fn remove_empty(&mut self) {
        if std::mem::take(&mut self.is_empty) && self.is_held().unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Whether the file at `path` is the one that is locked.
    fn is_held(&self) -> io::Result<bool> {
        let Some(held) = &self.held else { return Ok(false) };
        let (held, there) = (held.metadata()?, fs::symlink_metadata(&self.path));
        match there {
            Ok(there) => Ok((there.dev(), there.ino()) == (held.dev(), held.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Writes a file that was not there, and locks it. What a write that was cut off has left is removed, and not followed if it
/// is a link.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::create_new(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.write_all(bytes)?;
    Ok(file)
}

fn taken(path: &Path) -> Error {
    let path = path.display();
    let text = format!(
        "metrics_file {path}: another agent, in this process or another, writes this file; give each a file of its own, by \
         %a (the agent's name) and %p (the process id) in the path"
    );
    Error::new(ErrorKind::AlreadyExists, text)
}

fn unwritable(path: &Path, error: &io::Error) -> Error {
    let path = path.display();
    let text = format!(
        "metrics_file {path}: it cannot be written ({error}); give a path in a folder that exists and is writable, and remove \
         what is there if it is another user's or no file"
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
            let path = std::path::absolute(path).map_err(|e| unwritable(path, &e))?;
            let target = fs::read_link(&path).ok().and_then(|target| Some(path.parent()?.join(target)));
            return Ok(target.unwrap_or(path));
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

    fn folder(name: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("kvferry-metrics-{name}-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    type Figures = fn() -> Result<(AgentStats, Vec<PeerStats>)>;

    /// What the agent `name` writes to `path`, when it is told to.
    fn target(path: &Path, name: &str) -> Target<Figures> {
        let made = path.with_extension(name);
        Target { path: place(path).unwrap(), made, name: name.to_owned(), figures, held: None, is_empty: false }
    }

    /// Who wrote the file.
    fn writer(path: &Path) -> String {
        let text = fs::read_to_string(path).unwrap();
        text.split_once("kvferry_agent_regions{agent=\"").unwrap().1.split_once('"').unwrap().0.to_owned()
    }

    #[test]
    fn one_agent_writes_a_file_and_the_next_one_when_it_is_gone() {
        let folder = folder("one");
        let path = folder.join("x.prom");
        std::os::unix::fs::symlink("x.prom", folder.join("link")).unwrap();
        // Through a link to what is not there yet.
        let (mut first, mut second) = (target(&folder.join("link"), "first"), target(&path, "second"));
        let refused = |target: &mut Target<Figures>| {
            let error = target.write().err().unwrap();
            assert_eq!(error.kind(), ErrorKind::AlreadyExists);
            assert!(error.message().contains("%a") && error.message().contains("x.prom"), "{error}");
        };
        first.write().unwrap();
        // In the file that takes the place of the one before, too.
        for _ in 0..3 {
            refused(&mut second);
            first.write().unwrap();
        }
        assert!(folder.join("link").is_symlink());
        assert_eq!(writer(&path), "first");
        // Removed, it is whose next writing comes first. What somebody else has put there is nobody's.
        fs::remove_file(&path).unwrap();
        first.write().unwrap();
        refused(&mut second);
        fs::remove_file(&path).unwrap();
        second.write().unwrap();
        refused(&mut first);
        assert_eq!(writer(&path), "second");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "somebody's").unwrap();
        first.write().unwrap();
        refused(&mut second);
        drop(first);
        second.write().unwrap();
        assert_eq!(writer(&path), "second");
        let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_cannot_be_written_leaves_no_empty_file() {
        let folder = folder("empty");
        let path = folder.join("x.prom");
        let mut first = target(&path, "first");
        // A folder is where the new file is to be made.
        fs::create_dir_all(&first.made).unwrap();
        for _ in 0..2 {
            let error = first.write().err().unwrap();
            assert!(
                error.kind() == ErrorKind::Io && error.message().contains("x.prom: it cannot be written"),
                "{error}"
            );
            assert!(!path.exists());
        }
        // What somebody else has put there stays.
        fs::write(&path, "somebody's").unwrap();
        assert_eq!(first.write().err().unwrap().kind(), ErrorKind::Io);
        assert_eq!(fs::read_to_string(&path).unwrap(), "somebody's");
        fs::remove_file(&path).unwrap();
        assert!(first.write().is_err());
        let mut second = target(&path, "second");
        second.write().unwrap();
        assert_eq!(first.write().err().unwrap().kind(), ErrorKind::AlreadyExists);
        assert_eq!(writer(&path), "second");
        // Nor does one that is removed while the disk is full.
        fs::create_dir_all(&second.made).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(second.write().is_err() && !path.exists());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn of_many_that_start_at_once_one_gets_the_file() {
        let folder = folder("many");
        for round in 0..50 {
            let path = folder.join(format!("{round}.prom"));
            let barrier = std::sync::Barrier::new(4);
            let written = std::thread::scope(|scope| {
                let starts = ["a", "b", "c", "d"].map(|name| {
                    let mut target = target(&path, name);
                    let barrier = &barrier;
                    scope.spawn(move || {
                        barrier.wait();
                        let written = target.write().is_ok();
                        // All have tried before one gives up what it has.
                        barrier.wait();
                        drop(target);
                        written.then_some(name)
                    })
                });
                starts.map(|start| start.join().unwrap()).into_iter().flatten().collect::<Vec<_>>()
            });
            assert_eq!(written, [writer(&path)], "round {round}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_file_is_there_at_once_and_alone() {
        let folder = folder("at-once");
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
