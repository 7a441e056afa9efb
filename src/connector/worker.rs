//! One rank's worker: an agent whose progress thread also drives the worker's state machine.

use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use serde::de::IgnoredAny;

use super::channel::{Command, WorkerChannel, lock};
use super::config::WorkerConfig;
use super::driver::WorkerDriver;
use super::trace::{TraceFile, TraceSource};
use crate::agent::{Agent, AgentConfig, AgentStats};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::net;
use crate::proto::geometry::Geometry;
use crate::proto::stats::Stats;
use crate::proto::wire::{self, Message, RankMetadata, StepMetadata, WorkerReport};
use crate::proto::worker::{MachineGauges, WorkerMachine, WorkerMachineConfig};
use crate::secret::Key;
use crate::sys::Outbox;

/// Up to this length an encoded step is decoded by the caller to see whether it is empty, which costs less than waking
/// the progress thread for nothing. An empty step takes about 100 bytes.
const SMALL_STEP: usize = 160;

/// How long a cold call waits for the progress thread, which answers within milliseconds unless UCX or a driver hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// One rank of an engine, producer and consumer at once. `Send` and `Sync`; [`Worker::submit`] and [`Worker::poll`]
/// never wait for the progress thread, everything else may.
pub struct Worker {
    config: WorkerConfig,
    agent: Agent,
    shared: Arc<WorkerChannel>,
    key: Option<Key>,
    local: Mutex<Option<LocalMetadata>>,
    /// The registered regions.
    ranges: Mutex<Vec<MemoryRange>>,
}

struct LocalMetadata {
    metadata: Arc<RankMetadata>,
    encoded: Vec<u8>,
}

/// Counters of one worker since its start, and how much it holds now.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerStats {
    /// Counters of receives and sends.
    pub totals: Stats,
    /// The number of leases, loads and so on that the state machine remembers.
    pub gauges: MachineGauges,
    /// Counters of the agent.
    pub agent: AgentStats,
    /// Steps that could not be decoded.
    pub malformed_steps: u64,
    /// Messages of peers that could not be decoded.
    pub malformed_messages: u64,
}

impl Worker {
    /// Opens UCX and starts the progress thread.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a configuration that cannot work, by key; [`ErrorKind::Io`] for a
    /// trace that cannot be made; those of [`Key::load`] and [`Agent::start`].
    pub fn start(config: WorkerConfig) -> Result<Worker> {
        config.check()?;
        let key = Key::configured(config.agent.key_file.as_deref())?;
        let shared = Arc::new(WorkerChannel::default());
        let for_thread = Arc::clone(&shared);
        let timeout = Duration::from_millis(config.machine.handshake_timeout_ms);
        let for_client = key.clone();
        let agent = Agent::start_with(
            agent_config(&config),
            Box::new(move |_| Box::new(WorkerDriver::new(for_thread, timeout, for_client))),
        )?;
        // Now, when nothing else can fail any more: a worker that does not start leaves no empty file behind.
        let trace = TraceFile::configured(config.trace.as_deref(), config.request_log.as_deref())?;
        let machine_config = WorkerMachineConfig { trace: trace.is_some(), ..machine_config(&config, &agent) };
        let source = || TraceSource {
            name: agent.name().to_owned(),
            engine: config.engine_id.clone(),
            rank: config.rank(),
            incarnation: agent.incarnation(),
        };
        let tracer = trace.map(|file| file.start(source())).transpose()?;
        let machine = WorkerMachine::new(machine_config)?;
        shared.push(Command::Begin(Box::new(machine), tracer));
        agent.waker().wake();
        Ok(Worker { config, agent, shared, key, local: Mutex::new(None), ranges: Mutex::default() })
    }

    /// The configuration that the worker was started with.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// The agent beneath, for its name, incarnation and UCX.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Registers a KV-cache region. Returns its index, by which the geometry names it. All regions come before
    /// [`Worker::set_geometry`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] after [`Worker::set_geometry`]; [`ErrorKind::AlreadyExists`] when it overlaps a
    /// registered range; those of [`Agent::register`].
    pub fn register(&self, range: MemoryRange) -> Result<u32> {
        let local = lock(&self.local);
        if local.is_some() {
            return Err(Error::invalid(format!(
                "{range} was registered after set_geometry: peers may know this rank's metadata already; register \
                 every region first"
            )));
        }
        let mut ranges = lock(&self.ranges);
        if let Some((other, known)) = ranges.iter().enumerate().find(|(_, known)| known.overlaps(&range)) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{range} overlaps region {other}, which is {known}; a byte of the cache is in one region"),
            ));
        }
        let region = self.agent.register(range)?;
        ranges.push(range);
        drop((ranges, local));
        Ok(region.index())
    }

    /// States where in the registered regions which part of the cache lies. This completes the rank's metadata. Once;
    /// again with the same geometry is harmless.
    ///
    /// # Errors
    /// Those of [`RankMetadata::validate`], which checks the geometry against the registered regions; [`ErrorKind::AlreadyExists`] for another
    /// geometry than before.
    pub fn set_geometry(&self, geometry: Geometry) -> Result<()> {
        let mut local = lock(&self.local);
        if let Some(known) = local.as_ref() {
            if known.metadata.geometry == geometry {
                return Ok(());
            }
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "another geometry was set before, and peers may know it; start a new worker for another cache",
            ));
        }
        let agent = self.agent.metadata()?;
        let metadata = Arc::new(RankMetadata {
            engine: self.config.engine_id.clone(),
            rank: self.config.rank(),
            shape: self.config.shape(),
            compat: self.config.compat()?,
            geometry,
            agent,
        });
        metadata.validate().map_err(|e| e.context("this rank's metadata"))?;
        let encoded = metadata.to_bytes()?;
        self.shared.push(Command::Local(Arc::clone(&metadata)));
        self.agent.waker().wake();
        *local = Some(LocalMetadata { metadata, encoded });
        Ok(())
    }

    /// The encoded `RankMetadata` for the scheduler side. Its size grows with regions and layers, never with blocks.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] before [`Worker::set_geometry`].
    pub fn metadata(&self) -> Result<Vec<u8>> {
        match lock(&self.local).as_ref() {
            Some(local) => Ok(local.encoded.clone()),
            None => Err(Error::not_found(
                "the rank's metadata is not complete: register the KV-cache regions, then set the geometry",
            )),
        }
    }

    /// Hands the rank's metadata to its own engine's listener at `host`:`port` over ZMQ. For hosts without an RPC;
    /// `expected` is the number of ranks of the engine. Waits up to `timeout`, also for a listener that is not up
    /// yet. Returns how many ranks are still missing there.
    ///
    /// # Errors
    /// As [`Worker::metadata`] and [`net::push`].
    pub fn push_metadata(&self, host: &str, port: u16, expected: u32, timeout: Duration) -> Result<u32> {
        net::push(self.key.as_ref(), host, port, expected, self.metadata()?, timeout)
    }

    /// Hands over a step's work, as the scheduler side's `step` encoded it. Never waits. Only its envelope is checked
    /// here; a body that does not decode is logged and counted.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`], [`ErrorKind::VersionMismatch`] or [`ErrorKind::Exhausted`] for bytes that are no step,
    /// [`ErrorKind::ShutDown`] after the end of the progress thread.
    pub fn submit(&self, step: Vec<u8>) -> Result<()> {
        if self.shared.is_gone() {
            return Err(Error::new(ErrorKind::ShutDown, "the worker is shut down; the step was not taken"));
        }
        if step.len() <= SMALL_STEP {
            if StepMetadata::from_bytes(&step)?.is_empty() {
                return Ok(());
            }
        } else if !wire::begins_as::<StepMetadata>(&step) {
            // For the error.
            wire::decode::<IgnoredAny>(StepMetadata::KIND, StepMetadata::OLDEST, &step, StepMetadata::MAX_BYTES)?;
        }
        self.shared.push(Command::Step(step));
        self.agent.waker().wake();
        Ok(())
    }

    /// Returns the events since the last call, if there are any. Never waits; without any it costs one atomic load.
    pub fn poll(&self) -> Option<WorkerReport> {
        self.shared.take_report()
    }

    /// As [`Worker::poll`], encoded.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] when the report is too large for a message.
    pub fn poll_encoded(&self) -> Option<Result<Vec<u8>>> {
        self.shared.take_encoded()
    }

    /// Leaves reports in `outbox` from now on, for callers that poll often.
    ///
    /// A report that is too long, or that comes before the last one was read, waits for [`Worker::poll`]. That call
    /// also takes the report in the outbox, so do not make it while a thread reads there. `None` ends the use of
    /// an outbox. Once this returns, an earlier outbox is no longer touched.
    pub fn set_outbox(&self, outbox: Option<Outbox>) {
        self.shared.set_outbox(outbox);
    }

    /// As [`Worker::poll`], but waits for news for at most `timeout`; `None` at once when [`Worker::is_drained`].
    pub fn wait(&self, timeout: Duration) -> Option<WorkerReport> {
        self.shared.wait_report(timeout)
    }

    /// As [`Worker::wait`], encoded.
    ///
    /// # Errors
    /// As [`Worker::poll_encoded`].
    pub fn wait_encoded(&self, timeout: Duration) -> Option<Result<Vec<u8>>> {
        self.shared.wait_encoded(timeout)
    }

    /// True if the worker has ended and every report was taken. None will come any more.
    pub fn is_drained(&self) -> bool {
        self.shared.is_drained()
    }

    /// Counters and gauges.
    ///
    /// # Errors
    /// [`ErrorKind::ShutDown`] after the end of the progress thread.
    pub fn stats(&self) -> Result<WorkerStats> {
        let agent = self.agent.stats()?;
        let (reply, answer) = sync_channel(1);
        self.shared.push(Command::Figures(reply));
        self.agent.waker().wake();
        let gone = || Error::new(ErrorKind::ShutDown, "the worker is shut down");
        if self.shared.is_gone() {
            return Err(gone());
        }
        let figures = answer.recv_timeout(ANSWER_TIMEOUT).map_err(|_| gone())?;
        Ok(WorkerStats {
            totals: figures.totals,
            gauges: figures.gauges,
            agent,
            malformed_steps: self.shared.malformed_steps.load(Ordering::Relaxed),
            malformed_messages: self.shared.malformed_messages.load(Ordering::Relaxed),
        })
    }

    /// Ends every load, releases leases, closes the connections and ends the progress thread. Each load still gets
    /// its report, to be polled afterwards. After `Ok` the registered memory may be freed. A later call returns what
    /// the first one did.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] when that took longer than `timeout`: the memory must then stay alive.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        self.agent.shutdown(timeout)
    }

    /// As [`Worker::shutdown`], for an engine that starts a new worker later. That worker takes over by
    /// [`Scheduler::renew`](super::Scheduler::renew), and prefills that wait to be loaded stay with their producers.
    ///
    /// # Errors
    /// As [`Worker::shutdown`].
    pub fn suspend(&self, timeout: Duration) -> Result<()> {
        self.shared.suspends.store(true, Ordering::Release);
        self.shutdown(timeout)
    }
}

fn agent_config(config: &WorkerConfig) -> AgentConfig {
    let name = config.name.clone().unwrap_or_else(|| {
        let engine: String = config.engine_id.as_str().chars().take(32).collect();
        format!("{engine} pp{} tp{}", config.pp_rank, config.tp_rank)
    });
    AgentConfig {
        name,
        // Part of the handshake. On a starved machine an answer can take longer than an agent's default of 10 s.
        connect_timeout: Duration::from_millis(config.machine.handshake_timeout_ms),
        tells_connections: false,
        ..config.agent.clone()
    }
}

fn machine_config(config: &WorkerConfig, agent: &Agent) -> WorkerMachineConfig {
    let (engine, settings) = (config.engine_id.clone(), config.machine.clone());
    let base = WorkerMachineConfig::new(engine, config.rank(), config.shape(), agent.incarnation(), settings);
    WorkerMachineConfig { telemetry: config.agent.telemetry, ..base }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;
    use crate::agent::Stuck;
    use crate::proto::ids::EngineId;

    #[test]
    fn a_worker_that_ended_too_late_stays_so() {
        let mut config = WorkerConfig::new(EngineId::new("e").unwrap());
        config.agent.warm_up = false;
        let (go, may_go) = sync_channel(0);
        let agent = Agent::start_with(agent_config(&config), Box::new(|_| Box::new(Stuck(may_go)))).unwrap();
        let (shared, local, ranges) = (Arc::default(), Mutex::new(None), Mutex::default());
        let worker = Worker { config, agent, shared, key: None, local, ranges };
        let ends = [worker.suspend(Duration::ZERO), worker.suspend(Duration::from_secs(1))];
        let ends = ends.into_iter().chain([worker.shutdown(Duration::from_secs(1))]);
        assert!(ends.into_iter().all(|end| end.is_err_and(|error| error.kind() == ErrorKind::Timeout)));
        drop(go);
    }
}
