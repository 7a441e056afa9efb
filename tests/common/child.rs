//! Workers and scheduler sides in processes of their own: the test binary started again, driven by lines of JSON.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Process, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use kvferry::connector::{Scheduler, SchedulerConfig, Worker, WorkerConfig};
use kvferry::proto::ids::RankId;
use kvferry::proto::scheduler::FinishOutcome;
use kvferry::proto::wire::{Blocks, Message, TransferParams, WorkerReport};
use serde::{Deserialize, Serialize};

use super::cache::{Cache, CacheSpec, Loaded};

/// Set in a child; the test named `child` then serves instead of returning.
const CHILD: &str = "KVFERRY_TEST_CHILD";

/// What a child's lines start with, to tell them from those of the test harness.
const MARK: &str = "@kvferry ";

/// How long anything may take on a busy machine.
pub const LONG: Duration = Duration::from_secs(120);

/// Per KV-cache group, block ids.
pub type Lists = Vec<Vec<u32>>;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant)]
pub enum Ask {
    StartWorker {
        config: Box<WorkerConfig>,
        cache: Option<CacheSpec>,
    },
    /// Registers the cache and states the geometry, for a worker that was started without.
    Complete {
        cache: CacheSpec,
    },
    /// The rank's metadata, once more.
    Metadata,
    Submit {
        step: Vec<u8>,
    },
    /// A report within this many milliseconds, or nothing.
    Report {
        ms: u64,
    },
    Fill {
        request: String,
        blocks: Lists,
    },
    Check {
        loads: Vec<Loaded>,
    },
    Push {
        host: String,
        port: u16,
        expected: u32,
        ms: u64,
    },
    Stats,
    ShutDownWorker,
    SuspendWorker,
    StartScheduler {
        config: Box<SchedulerConfig>,
    },
    Serve {
        ranks: Vec<(RankId, Vec<u8>)>,
    },
    Finished {
        request: String,
        params: TransferParams,
        blocks: Lists,
        tokens: u64,
    },
    Step,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Tell {
    Ok,
    Bytes(Vec<u8>),
    Report(Option<Vec<u8>>),
    Address(String, u16),
    Count(u64),
    Params(Option<Box<TransferParams>>),
    Stats {
        loads: usize,
        leases: usize,
        transfers: u64,
        peers: u64,
        totals_bytes: u64,
        malformed_steps: u64,
        turns: u64,
    },
    Error {
        kind: i32,
        message: String,
    },
}

/// Serves if this process is a child; the test named `child` of every binary that uses this calls it.
pub fn serve_if_child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    std::thread::spawn({
        // A parent that dies must not leave children behind.
        let parent = std::os::unix::process::parent_id();
        move || {
            while std::os::unix::process::parent_id() == parent {
                std::thread::sleep(Duration::from_millis(500));
            }
            std::process::exit(3);
        }
    });
    if std::env::var_os("KVFERRY_TEST_LOG").is_some() {
        let _ = log::set_logger(&Stderr);
        log::set_max_level(log::LevelFilter::Debug);
    }
    let mut state = State::default();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let tell = match serde_json::from_str::<Ask>(&line) {
            Ok(ask) => {
                state.serve(ask).unwrap_or_else(|e| Tell::Error { kind: e.kind().code(), message: e.message().into() })
            }
            Err(e) => Tell::Error { kind: 0, message: e.to_string() },
        };
        let text = serde_json::to_string(&tell).unwrap();
        // On a line of its own: the harness may have left one open.
        println!("\n{MARK}{text}");
        std::io::stdout().flush().unwrap();
    }
    if let Some(worker) = state.worker.take() {
        worker.shutdown(Duration::from_secs(20)).unwrap();
    }
    std::process::exit(0);
}

struct Stderr;

impl log::Log for Stderr {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        eprintln!("[{} {}] {}", std::process::id(), record.level(), record.args());
    }
    fn flush(&self) {}
}

#[derive(Default)]
struct State {
    worker: Option<Worker>,
    scheduler: Option<Scheduler>,
    cache: Option<Cache>,
}

fn lists(blocks: Lists) -> Vec<Blocks> {
    blocks.into_iter().map(Blocks::from).collect()
}

impl State {
    fn worker(&self) -> &Worker {
        self.worker.as_ref().expect("a worker was started")
    }

    /// A report, as a host in another language takes it: the first rank of a stage waits, the others look.
    fn report(&self, limit: Duration) -> Option<kvferry::Result<Vec<u8>>> {
        let worker = self.worker();
        if worker.config().rank().tp == 0 {
            return worker.wait_encoded(limit);
        }
        let end = Instant::now() + limit;
        loop {
            match worker.poll_encoded() {
                None if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
                report => return report,
            }
        }
    }

    fn scheduler(&self) -> &Scheduler {
        self.scheduler.as_ref().expect("a scheduler side was started")
    }

    fn complete(&mut self, cache: CacheSpec) -> kvferry::Result<Tell> {
        let cache = Cache::new(cache, self.worker().config().rank());
        cache.give_to(self.worker())?;
        self.cache = Some(cache);
        Ok(Tell::Bytes(self.worker().metadata()?))
    }

    fn serve(&mut self, ask: Ask) -> kvferry::Result<Tell> {
        match ask {
            Ask::StartWorker { config, cache } => {
                self.worker = Some(Worker::start(*config)?);
                match cache {
                    Some(cache) => return self.complete(cache),
                    None => assert_eq!(self.worker().metadata().unwrap_err().kind(), kvferry::ErrorKind::NotFound),
                }
            }
            Ask::Complete { cache } => return self.complete(cache),
            Ask::Metadata => return Ok(Tell::Bytes(self.worker().metadata()?)),
            Ask::Submit { step } => self.worker().submit(step)?,
            Ask::Report { ms } => {
                return Ok(Tell::Report(self.report(Duration::from_millis(ms)).transpose()?));
            }
            Ask::Fill { request, blocks } => self.cache.as_mut().unwrap().fill(&request, &blocks),
            Ask::Check { loads } => {
                return match self.cache.as_ref().unwrap().check(&loads) {
                    Ok(bytes) => Ok(Tell::Count(bytes)),
                    Err(message) => Ok(Tell::Error { kind: 0, message }),
                };
            }
            Ask::Push { host, port, expected, ms } => {
                let missing = self.worker().push_metadata(&host, port, expected, Duration::from_millis(ms))?;
                return Ok(Tell::Count(missing.into()));
            }
            Ask::Stats => {
                let s = self.worker().stats()?;
                return Ok(Tell::Stats {
                    loads: s.gauges.loads,
                    leases: s.gauges.leases,
                    transfers: s.agent.transfers,
                    peers: s.agent.peers,
                    totals_bytes: s.totals.bytes,
                    malformed_steps: s.malformed_steps,
                    turns: s.agent.turns,
                });
            }
            Ask::ShutDownWorker => self.worker().shutdown(Duration::from_secs(30))?,
            Ask::SuspendWorker => self.worker().suspend(Duration::from_secs(30))?,
            Ask::StartScheduler { config } => self.scheduler = Some(Scheduler::start(*config)?),
            Ask::Serve { ranks } => {
                let (host, port) = self.scheduler().serve(ranks)?;
                return Ok(Tell::Address(host, port));
            }
            Ask::Finished { request, params, blocks, tokens } => {
                let finish =
                    self.scheduler().finished(&request, &params, FinishOutcome::Complete, lists(blocks), tokens)?;
                return Ok(Tell::Params(finish.params.map(Box::new)));
            }
            Ask::Step => return Ok(Tell::Bytes(self.scheduler().step()?)),
        }
        Ok(Tell::Ok)
    }
}

/// The parent's end of a child. Dropping it ends the child.
pub struct Child {
    process: Process,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    pub rank: RankId,
}

impl Child {
    /// Starts this test binary again. `netns` names the network namespace to start it in.
    pub fn start(rank: RankId, netns: Option<&str>, env: &[(&str, &str)]) -> Child {
        let me = std::env::current_exe().unwrap();
        let mut command = match netns {
            Some(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).arg(me);
                command
            }
            None => Command::new(me),
        };
        command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(CHILD, "1");
        // UCX would else write its messages into the middle of answers.
        command.env("UCX_LOG_FILE", "stderr");
        command.envs(env.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let stdin = process.stdin.take();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(text) = line.strip_prefix(MARK)
                    && send.send(text.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Child { process, stdin, lines, rank }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn send(&mut self, ask: &Ask) {
        let stdin = self.stdin.as_mut().unwrap();
        writeln!(stdin, "{}", serde_json::to_string(ask).unwrap()).unwrap();
        stdin.flush().unwrap();
    }

    pub fn receive(&mut self) -> Tell {
        match self.lines.recv_timeout(LONG + LONG) {
            Ok(line) => serde_json::from_str(&line).unwrap(),
            Err(RecvTimeoutError::Timeout) => panic!("child {} of rank {} is silent", self.pid(), self.rank),
            Err(RecvTimeoutError::Disconnected) => {
                panic!("child {} of rank {} ended: {:?}", self.pid(), self.rank, self.process.wait())
            }
        }
    }

    pub fn ask(&mut self, ask: &Ask) -> Tell {
        self.send(ask);
        self.receive()
    }

    /// Asks for something that has to succeed.
    pub fn ok(&mut self, ask: &Ask) -> Tell {
        self.send(ask);
        self.received()
    }

    /// What is told of something that has to succeed.
    pub fn received(&mut self) -> Tell {
        match self.receive() {
            Tell::Error { message, kind } => panic!("rank {}: error {kind}: {message}", self.rank),
            tell => tell,
        }
    }

    pub fn bytes(&mut self, ask: &Ask) -> Vec<u8> {
        match self.ok(ask) {
            Tell::Bytes(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    pub fn report(&mut self, ms: u64) -> Option<WorkerReport> {
        match self.ok(&Ask::Report { ms }) {
            Tell::Report(report) => report.map(|bytes| WorkerReport::from_bytes(&bytes).unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub fn check(&mut self, loads: &[Loaded]) {
        let Tell::Count(bytes) = self.ok(&Ask::Check { loads: loads.to_vec() }) else { panic!("no count") };
        assert!(bytes > 0);
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        // A thread that has not stopped yet would still answer what comes now.
        let stopped = || {
            let mut tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
            tasks.all(|task| {
                let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
                stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
            })
        };
        while signal == rustix::process::Signal::STOP && !stopped() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Asks it to shut down, which the end of its input does.
    pub fn end(&mut self) {
        drop(self.stdin.take());
    }

    pub fn kill(&mut self) {
        self.signal(rustix::process::Signal::KILL);
        self.process.wait().unwrap();
    }

    /// Processor time that all threads of the child have used so far.
    pub fn cpu(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let nanos = |task: std::fs::DirEntry| {
            let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
        };
        Duration::from_nanos(tasks.map(|task| nanos(task.unwrap())).sum())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It gets some time for its shutdown.
        self.end();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(30) && !std::thread::panicking() {
            if let Ok(Some(_)) = self.process.try_wait() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
