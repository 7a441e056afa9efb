//! The progress thread: wait, serve, post, progress, let the driver have its turn, and again.
//!
//! Waiting follows UCX's protocol for its event fd: progress until there is nothing left, arm, and only if arming
//! found no news sleep on the fd. Three states decide how long:
//!
//! - operations of transfers in flight, but for those that bytes come slowly for, or a peer's request served just now: spin
//!   for [`AgentConfig::spin`] after the last progress, because the next news is some microseconds away and to be woken takes
//!   longer, unless too many threads of the process spin already, and giving way to others ([`Spinner`]); then sleep in steps
//!   of a millisecond, because some transports (CUDA IPC) do not wake the fd, nor do our own copies on devices;
//! - other operations in flight (messages, closing connections): sleep in steps of a millisecond;
//! - nothing in flight: sleep until something happens or a timer is due. An idle agent wakes only to look at its data port,
//!   every two seconds.
//!
//! While a caller polls without a pause and there is nothing long to move, the caller drives the engine, and the thread soon
//! stands aside ([`Callers`]).
//!
//! When UCX's event fd woke the thread in vain several times in a row, only changes of it count ([`EdgeWait`]).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::Engine;
use super::driver::MakeDriver;
use super::turn::{Driven, Turned};
use crate::agent::command::Shared;
use crate::agent::core::config::AgentConfig;
use crate::agent::thread::callers::Callers;
use crate::agent::thread::edge_wait::EdgeWait;
use crate::agent::thread::spin::Spinner;
use crate::agent::thread::waker::Waker;
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::mem::ucx_error;
use crate::proto::ids::Incarnation;
use crate::sys::isolated::{Gone, Isolated};
use crate::sys::thread::wait_readable;
use crate::ucx::Armed;

/// The longest sleep while UCX has anything to do.
const BUSY_SLEEP: Duration = Duration::from_millis(1);
/// How often sockets are looked at while the loop does not sleep.
const LOOK_INTERVAL: Duration = Duration::from_micros(500);
/// So many times in a row may UCX's event fd wake the thread in vain before only its changes do.
const VAIN_WAKES: u32 = 4;
/// The longest sleep while only changes of UCX's event fd wake, should UCX ever have news without one.
const EDGE_SLEEP: Duration = Duration::from_millis(100);
/// The step in which UCX is armed again after an error of arming, which no UCX is known to return.
const ARM_RETRY: Duration = Duration::from_millis(1);

/// What the progress thread reports when it is up.
#[derive(Clone)]
pub(crate) struct Started {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) ucx: String,
    pub(crate) engine: Arc<Isolated<Driven>>,
    pub(crate) callers: Arc<Callers>,
}

/// Drops the engine on the progress thread, however that ends.
struct Owner(Arc<Isolated<Driven>>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// Runs an agent: the progress thread's function. Returns when the agent was shut down.
pub(crate) fn run(
    config: AgentConfig,
    incarnation: Incarnation,
    shared: &Arc<Shared>,
    make: Option<MakeDriver>,
    up: &SyncSender<Started>,
) -> Result<()> {
    let now = Instant::now();
    let callers = Arc::new(Callers::new(now));
    let name = config.name.clone();
    let engine = Isolated::new(|| {
        let engine = Engine::new(config, incarnation, shared)?;
        let driver = make.map(|make| make(shared.waker.clone()));
        Ok::<_, Error>(Driven::new(engine, driver, &callers))
    })?;
    let owner = Owner(Arc::new(engine));
    let (ucx, edges) = lent(owner.0.with(|driven| {
        let engine = &driven.engine;
        EdgeWait::of(engine.worker.event_fd()).map(|edges| (engine.context.library().info().to_string(), edges))
    }))??;
    // The starter waits for it.
    let engine = Arc::clone(&owner.0);
    let _ = up.send(Started { name: name.clone(), incarnation, ucx, engine, callers: Arc::clone(&callers) });
    let waker = shared.waker.clone();
    let mut thread = Thread {
        name,
        edges,
        worker: 0,
        log: LogLimit::default(),
        vain: 0,
        waker,
        looked_at: now,
        spinner: Spinner::new(),
        callers: Arc::clone(&callers),
    };
    // The driver's first turn needs no reason.
    let mut is_woken = true;
    loop {
        callers.want(true);
        let rest = lent(owner.0.with(|driven| {
            callers.want(false);
            thread.turn(driven, is_woken)
        }))?;
        is_woken = match rest {
            Rest::No { is_woken } => is_woken,
            Rest::GiveWay { is_woken } => {
                thread.spinner.give_way();
                is_woken
            }
            Rest::Sleep(sleep) => thread.sleep(&sleep, None),
            Rest::StandAside => {
                thread.stand_aside();
                true
            }
            Rest::Over { in_time } => return lent(owner.0.end(|driven| driven.finish(in_time)))?,
        };
    }
}

/// The engine, or why the thread has none any more.
fn lent<T>(engine: std::result::Result<T, Gone>) -> Result<T> {
    engine.map_err(|gone| {
        let text =
            format!("a caller's thread has left the engine unusable ({gone:?}); the log has its panic's message");
        Error::new(ErrorKind::Internal, text)
    })
}

/// How the thread comes to its next turn.
enum Rest {
    /// At once. The driver has its turn too if it `is_woken`.
    No {
        is_woken: bool,
    },
    /// At once if no other thread waits for the processor.
    GiveWay {
        is_woken: bool,
    },
    Sleep(Sleep),
    /// As long as a caller polls.
    StandAside,
    /// No more.
    Over {
        in_time: bool,
    },
}

/// What the thread sleeps for.
struct Sleep {
    /// `None` is for ever.
    until: Option<Instant>,
    now: Instant,
    ucx: RawFd,
    /// Whether only changes of `ucx` count.
    edges: bool,
    spin: Duration,
}

/// What the progress thread has for itself.
struct Thread {
    /// The agent's name, for log lines.
    name: String,
    /// Of the event fd of the engine's worker.
    edges: EdgeWait,
    /// Which of the engine's workers that is.
    worker: u64,
    /// Of errors of watching it.
    log: LogLimit,
    /// How often the event fd woke the thread since there was any progress.
    vain: u32,
    waker: Waker,
    /// When the sockets were looked at last.
    looked_at: Instant,
    spinner: Spinner,
    callers: Arc<Callers>,
}

impl Thread {
    /// Takes a turn, and says how the thread comes to the next one.
    fn turn(&mut self, driven: &mut Driven, is_woken: bool) -> Rest {
        self.callers.leave();
        let any = match driven.turn(is_woken) {
            Turned::Any => true,
            Turned::Nothing => false,
            Turned::Over { in_time } => return Rest::Over { in_time },
        };
        if any {
            self.vain = 0;
        }
        let rest = self.rest(driven, any);
        match (rest, &driven.driver) {
            // Its sockets are its own, so nobody else gets the engine meanwhile.
            (Rest::Sleep(sleep), Some(_)) => Rest::No { is_woken: self.sleep(&sleep, Some(driven)) },
            (rest, _) => rest,
        }
    }

    /// How long the state allows to sleep.
    fn rest(&mut self, driven: &mut Driven, any: bool) -> Rest {
        let now = Instant::now();
        if self.callers.are_polling(now) && driven.is_light() {
            self.spinner.rest();
            self.callers.enter();
            return Rest::StandAside;
        }
        let engine = &mut driven.engine;
        let spin = engine.config.spin;
        let serving = engine.served_at.is_some_and(|at| now.saturating_duration_since(at) < spin);
        let copying = engine.device_copies.are_running() || engine.staged.is_running();
        let operations = engine.transfers.in_flight().operations;
        // What was not asked of a peer, such as an operation of UCX, is worth it anyway.
        let is_fast = operations > engine.rpc.borrow().len() as u64 || engine.peers.has_fast_reads(now);
        let moving = serving || copying || operations > 0 && is_fast;
        let spins = moving && now.saturating_duration_since(driven.progressed_at) < spin && self.spinner.may_spin(now);
        if !spins {
            self.spinner.rest();
        }
        self.follow(engine);
        let edges = self.vain >= VAIN_WAKES;
        let ucx = if edges { self.edges.fd() } else { engine.worker.event_fd().as_raw_fd() };
        let sleep = |until| Rest::Sleep(Sleep { until, now, ucx, edges, spin });
        if any || spins {
            if driven.driver.is_none() || now.duration_since(self.looked_at) < LOOK_INTERVAL {
                let is_woken = self.waker.is_pending();
                return if any { Rest::No { is_woken } } else { Rest::GiveWay { is_woken } };
            }
            return sleep(Some(now));
        }
        let limit = match engine.worker.arm() {
            Ok(Armed::Busy) => return Rest::No { is_woken: false },
            Ok(Armed::Yes) => None,
            Err(e) => {
                log::error!("agent {}: {}", engine.config.name, ucx_error(e));
                now.checked_add(ARM_RETRY)
            }
        };
        let works = engine.worker.in_flight() > 0 || copying;
        let busy = (works || engine.closing.is_some()).then(|| now + BUSY_SLEEP);
        let timers = [limit, busy, edges.then(|| now + EDGE_SLEEP), driven.wish, engine.deadline()];
        engine.stats.sleeps += 1;
        sleep(timers.into_iter().flatten().min())
    }

    /// Watches the engine's worker, if it is another one than before.
    fn follow(&mut self, engine: &Engine) {
        if self.worker == engine.workers {
            return;
        }
        match EdgeWait::of(engine.worker.event_fd()) {
            Ok(edges) => (self.edges, self.worker, self.vain) = (edges, engine.workers, 0),
            Err(error) => {
                // Until then every news of the descriptor wakes it.
                self.vain = 0;
                if let Some(left_out) = self.log.pass(Instant::now()) {
                    log::warn!("agent {}: {error} ({left_out} similar lines suppressed)", self.name);
                }
            }
        }
    }

    /// Waits for the file descriptors, and for the sockets of the driver if there is one. Returns whether the driver is to
    /// have a turn.
    fn sleep(&mut self, sleep: &Sleep, driven: Option<&Driven>) -> bool {
        let timeout = match sleep.until {
            None => -1,
            // Rounded up: a timer that is looked at too early would be looked at again and again.
            Some(until) => i64::try_from(until.saturating_duration_since(sleep.now).as_nanos().div_ceil(1_000_000))
                .unwrap_or(i64::MAX)
                .min(3_600_000),
        };
        let mut items =
            vec![zmq::PollItem::from_fd(sleep.ucx, zmq::POLLIN), zmq::PollItem::from_fd(self.waker.fd(), zmq::POLLIN)];
        if let Some(driver) = driven.and_then(|driven| driven.driver.as_ref()) {
            driver.poll_items(&mut items);
        }
        // A look that does not sleep needs no raised descriptor: what is pending is seen in the next turn.
        let sleeps = timeout != 0 && self.waker.lie_down();
        let polled = zmq::poll(&mut items, if sleeps { timeout } else { 0 });
        let is_raised = items.get(1).is_some_and(|waker| waker.get_revents() != zmq::PollEvents::empty());
        self.waker.get_up(is_raised);
        self.looked_at = Instant::now();
        if sleeps {
            self.spinner.wake(self.looked_at, sleep.spin);
        }
        if let Err(error) = polled {
            // A signal is no matter. Anything else (a socket that was closed under us) must not become a busy loop.
            if error != zmq::Error::EINTR {
                log::error!("agent {}: waiting for events: {error}", self.name);
                std::thread::sleep(BUSY_SLEEP);
            }
            return true;
        }
        let mut ready = items.iter().map(|item| item.get_revents() != zmq::PollEvents::empty());
        // UCX's own descriptor, whose news become events.
        if ready.next() == Some(true) {
            self.vain = self.vain.saturating_add(1);
            if sleep.edges {
                self.edges.clear();
            }
        }
        ready.any(|is_ready| is_ready)
    }

    /// Waits until no caller polls without a pause any more, or until there is something that callers do not do.
    fn stand_aside(&mut self) {
        loop {
            let is_calm = self.waker.lie_down();
            let is_raised = is_calm && wait_readable(self.waker.fd(), self.callers.patience_left(Instant::now()));
            self.waker.get_up(is_raised);
            if !is_calm || is_raised || !self.callers.are_polling(Instant::now()) {
                return;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::super::tests::{LEN, config, drive, read, reader};
    use super::*;
    use crate::agent::{Agent, Transport};
    use crate::mem::MemoryRange;

    /// The progress thread's own things, for an engine that a test drives.
    fn thread(driven: &Driven, now: Instant) -> Thread {
        Thread {
            name: "a".to_owned(),
            edges: EdgeWait::of(driven.engine.worker.event_fd()).unwrap(),
            worker: 0,
            log: LogLimit::default(),
            vain: 0,
            waker: driven.engine.shared.waker.clone(),
            looked_at: now,
            spinner: Spinner::alone(now),
            callers: Arc::new(Callers::new(now)),
        }
    }

    #[test]
    fn turns_visit_no_idle_peer() {
        let others = [(); 6].map(|()| {
            let other = Agent::start(config("b", Transport::Tcp)).unwrap();
            other.register(MemoryRange::leaked(3 * LEN)).unwrap();
            other
        });
        let (mut engine, reader) = reader(Transport::Tcp, &others[0]);
        for idle in &others[1..] {
            let peer = engine.connect(&idle.metadata().unwrap(), Instant::now()).unwrap();
            drive(&mut engine, |engine| engine.peers.get(peer).unwrap().is_ready());
        }
        let now = Instant::now();
        let mut driven = Driven::new(engine, None, &Arc::new(Callers::new(now)));
        let mut thread = thread(&driven, now);
        let before = driven.engine.peers.visits();
        let read = read(&mut driven.engine, reader);
        let mut turns = 0;
        while driven.engine.transfers.get(read).is_some() {
            assert!(now.elapsed() < Duration::from_secs(120), "not within two minutes");
            assert!(!matches!(thread.turn(&mut driven, false), Rest::Over { .. }));
            turns += 1;
        }
        assert_eq!(driven.engine.peers.visits() - before, 0, "in {turns} turns");
        drop(driven);
        for other in others {
            other.shutdown(Duration::from_secs(60)).unwrap();
        }
    }

    #[test]
    fn a_thread_that_would_spin_is_to_give_way_and_one_without_work_to_sleep() {
        let shared = Arc::new(Shared::new(1).unwrap());
        // Longer than this test can take.
        let config = AgentConfig { spin: Duration::from_secs(3600), ..config("a", Transport::Tcp) };
        let engine = Engine::new(config, Incarnation(77), &shared).unwrap();
        let now = Instant::now();
        let mut driven = Driven::new(engine, None, &Arc::new(Callers::new(now)));
        let mut thread = thread(&driven, now);
        driven.engine.served_at = Some(now);
        assert!(matches!(thread.rest(&mut driven, false), Rest::GiveWay { .. }));
        assert!(matches!(thread.rest(&mut driven, true), Rest::No { .. }));
        driven.engine.served_at = None;
        // UCX may have something to do at first. Then only the data port is looked at now and then.
        let sleeps = |rest: Rest, driven: &Driven| match rest {
            Rest::Sleep(Sleep { until, .. }) => until == driven.engine.data_port.deadline(),
            _ => false,
        };
        while !sleeps(thread.rest(&mut driven, false), &driven) {
            assert!(now.elapsed() < Duration::from_secs(120), "not within two minutes");
            assert_ne!(driven.turn(false), Turned::Over { in_time: true });
        }
    }
}
