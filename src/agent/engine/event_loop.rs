//! The progress thread: wait, serve, post, progress, let the driver have its turn, and again.
//!
//! Waiting follows UCX's protocol for its event fd: progress until there is nothing left, arm, and only if arming
//! found no news sleep on the fd. Three states decide how long:
//!
//! - operations of transfers in flight, but for those that bytes come slowly for, or a peer's request served just now: spin for [`AgentConfig::spin`] after the last
//!   progress, because the next news is some microseconds away and to be woken takes longer, unless too many threads of the
//!   process spin already ([`Spinner`]); then sleep in steps of a millisecond, because some transports (CUDA IPC) do not
//!   wake the fd, nor do our own copies on devices;
//! - other operations in flight (messages, closing connections): sleep in steps of a millisecond;
//! - nothing in flight: sleep until something happens or a timer is due. An idle agent uses no processor time.
//!
//! When UCX's event fd woke the thread in vain several times in a row, only changes of it count ([`EdgeWait`]).

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::Engine;
use super::driver::{Context, Driver, MakeDriver};
use crate::agent::command::{Command, Shared};
use crate::agent::core::config::AgentConfig;
use crate::agent::thread::edge_wait::EdgeWait;
use crate::agent::thread::spin::Spinner;
use crate::agent::thread::time_slice::TimeSlice;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::proto::ids::Incarnation;
use crate::ucx::Armed;

/// How long UCX may be driven before messages, commands and timers are looked at: requests that arrived are answered, and
/// further ones sent, only after that. With CMA, one progress call copies up to about 4 MiB.
const PROGRESS_TIME: Duration = Duration::from_micros(100);
/// Commands served per turn.
const COMMANDS_PER_TURN: usize = 256;
/// The longest sleep while UCX has anything to do.
const BUSY_SLEEP: Duration = Duration::from_millis(1);
/// How often sockets are looked at while the loop does not sleep.
const LOOK_INTERVAL: Duration = Duration::from_micros(500);
/// So many times in a row may UCX's event fd wake the thread in vain before only its changes do.
const VAIN_WAKES: u32 = 4;
/// The longest sleep while only changes of UCX's event fd wake, should UCX ever have news without one.
const EDGE_SLEEP: Duration = Duration::from_millis(100);
/// What UCX gets to end the last operations when a shutdown's time is already up.
const LAST_CHANCE: Duration = Duration::from_millis(100);
/// The step in which UCX is armed again after an error of arming, which no UCX is known to return.
const ARM_RETRY: Duration = Duration::from_millis(1);

/// What the progress thread reports when it is up.
#[derive(Debug, Clone)]
pub(crate) struct Started {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) ucx: String,
}

/// Runs an agent: the progress thread's function. Returns when the agent was shut down.
pub(crate) fn run(
    config: AgentConfig,
    incarnation: Incarnation,
    shared: &Arc<Shared>,
    make: Option<MakeDriver>,
    up: &SyncSender<Started>,
) -> Result<()> {
    let engine = Engine::new(config, incarnation, shared)?;
    let started =
        Started { name: engine.config.name.clone(), incarnation, ucx: engine.context.library().info().to_string() };
    let edges = EdgeWait::of(engine.worker.event_fd())?;
    let driver = make.map(|make| make(shared.waker.clone()));
    let now = Instant::now();
    let shared = Arc::clone(shared);
    // Only now, so that the threads that UCX has made do not inherit it.
    let (time_slice, asked) = TimeSlice::new(now);
    if let Err(error) = asked {
        log::debug!("agent {}: the kernel gives no shorter turns: {error}", engine.config.name);
    }
    let spinner = Spinner::new();
    let context = Loop {
        engine,
        driver,
        shared,
        progressed_at: now,
        looked_at: now,
        edges,
        vain: 0,
        spinner,
        time_slice,
        lends_until: None,
    };
    // The starter waits for it.
    let _ = up.send(started);
    context.run()
}

struct Loop {
    /// Of the event fd of the engine's worker; closed before that.
    edges: EdgeWait,
    /// How often the event fd woke the thread since there was any progress.
    vain: u32,
    engine: Engine,
    driver: Option<Box<dyn Driver>>,
    shared: Arc<Shared>,
    /// When anything happened last.
    progressed_at: Instant,
    /// When the sockets were looked at last.
    looked_at: Instant,
    spinner: Spinner,
    time_slice: TimeSlice,
    /// While the agent shuts down: until when pages are left to the sockets that have them.
    lends_until: Option<Instant>,
}

impl Loop {
    fn run(mut self) -> Result<()> {
        // The driver's first turn needs no reason.
        let mut woken = true;
        let mut wish: Option<Instant> = None;
        loop {
            self.engine.stats.turns += 1;
            // What the thread was woken for goes out before UCX is driven, which takes its time.
            let mut any = self.serve_commands(Instant::now());
            if any {
                self.engine.post_transfers();
            }
            any |= self.progress();
            let now = Instant::now();
            any |= self.engine.drive_streams(now);
            self.engine.check_timers(now);
            any |= self.engine.post_transfers();
            if self.driver.is_some() {
                if any || woken || !self.engine.events.is_empty() || wish.is_some_and(|at| at <= now) {
                    wish = self.driver_turn();
                    // What it started is posted before the loop sleeps.
                    any |= self.engine.post_transfers() || !self.engine.events.is_empty();
                }
            } else {
                self.shared.publish(&mut self.engine.events);
            }
            if let Some(deadline) = self.engine.closing {
                if self.may_end(now) {
                    return self.finish(true);
                }
                if now >= deadline {
                    return self.finish(false);
                }
            }
            if any {
                // Posting has taken its time.
                self.progressed_at = Instant::now();
                self.vain = 0;
            }
            woken = self.wait(any, wish);
        }
    }

    /// Drives UCX until it is idle or has had its time, and takes what came of it.
    fn progress(&mut self) -> bool {
        let begin = Instant::now();
        let mut any = false;
        while self.engine.worker.progress() {
            any = true;
            if begin.elapsed() >= PROGRESS_TIME {
                break;
            }
        }
        let now = Instant::now();
        // Failures first, so that the operations that they end are the lost peer's.
        self.engine.reap_failed_endpoints(now);
        self.engine.reap_completions(now);
        self.engine.reap_copies(now);
        any |= self.engine.reap_device_copies(now) | self.engine.reap_staged(now);
        self.engine.receive_messages(now);
        any
    }

    fn serve_commands(&mut self, now: Instant) -> bool {
        if !self.shared.waker.take() {
            return false;
        }
        for _ in 0..COMMANDS_PER_TURN {
            match self.shared.next_command() {
                Some(Command::ShutDown { deadline }) => self.begin_shutdown(deadline, now),
                Some(command) => self.engine.serve(command, now),
                None => return true,
            }
        }
        // There may be more.
        self.shared.waker.wake();
        true
    }

    fn driver_turn(&mut self) -> Option<Instant> {
        let mut context = Context::new(&mut self.engine, Instant::now());
        self.driver.as_mut().and_then(|driver| driver.turn(&mut context))
    }

    /// Sleeps as long as the state allows. Returns whether the driver should have a turn.
    fn wait(&mut self, any: bool, wish: Option<Instant>) -> bool {
        let now = Instant::now();
        let spin = self.engine.config.spin;
        let serving = self.engine.served_at.is_some_and(|at| now.saturating_duration_since(at) < spin);
        let copying = self.engine.device_copies.are_running() || self.engine.staged.is_running();
        let operations = self.engine.transfers.in_flight().operations;
        let moving = serving || copying || operations > 0 && operations > self.engine.peers.slow_reads(now);
        let spins = moving && now.saturating_duration_since(self.progressed_at) < spin && self.spinner.may_spin();
        if !spins {
            self.spinner.rest();
        }
        if any {
            self.time_slice.work(now);
        }
        if any || spins {
            if self.driver.is_none() || now.duration_since(self.looked_at) < LOOK_INTERVAL {
                return self.shared.waker.is_pending();
            }
            return self.sleep(Some(now), now);
        }
        let limit = match self.engine.worker.arm() {
            Ok(Armed::Busy) => return false,
            Ok(Armed::Yes) => None,
            Err(e) => {
                log::error!("agent {}: {}", self.engine.config.name, ucx_error(e));
                now.checked_add(ARM_RETRY)
            }
        };
        let edges = (self.vain >= VAIN_WAKES).then(|| now + EDGE_SLEEP);
        let works = self.engine.worker.in_flight() > 0 || copying;
        let busy = (works || self.engine.closing.is_some()).then(|| now + BUSY_SLEEP);
        let timers = [limit, busy, edges, wish, self.engine.deadline()];
        self.engine.stats.sleeps += 1;
        self.sleep(timers.into_iter().flatten().min(), now)
    }

    /// Waits for the file descriptors and sockets until `until`; `None` is for ever.
    fn sleep(&mut self, until: Option<Instant>, now: Instant) -> bool {
        let timeout = match until {
            None => -1,
            // Rounded up: a timer that is looked at too early would be looked at again and again.
            Some(until) => i64::try_from(until.saturating_duration_since(now).as_nanos().div_ceil(1_000_000))
                .unwrap_or(i64::MAX)
                .min(3_600_000),
        };
        let news = self.vain >= VAIN_WAKES;
        let event_fd = if news { self.edges.fd() } else { self.engine.worker.event_fd().as_raw_fd() };
        let mut items = vec![
            zmq::PollItem::from_fd(event_fd, zmq::POLLIN),
            zmq::PollItem::from_fd(self.shared.waker.fd(), zmq::POLLIN),
        ];
        let streams = self.engine.streams.fd().map(|fd| zmq::PollItem::from_fd(fd, zmq::POLLIN));
        let has_streams = streams.is_some();
        items.extend(streams);
        if let Some(driver) = &self.driver {
            driver.poll_items(&mut items);
        }
        // A look that does not sleep needs no raised descriptor: what is pending is seen in the next turn.
        let sleeps = timeout != 0 && self.shared.waker.lie_down();
        if sleeps {
            self.time_slice.sleep();
        }
        let polled = zmq::poll(&mut items, if sleeps { timeout } else { 0 });
        let is_raised = items.get(1).is_some_and(|waker| waker.get_revents() != zmq::PollEvents::empty());
        self.shared.waker.get_up(is_raised);
        self.looked_at = Instant::now();
        if sleeps {
            self.time_slice.wake(self.looked_at);
            self.spinner.wake(self.looked_at, self.engine.config.spin);
        }
        if let Err(error) = polled {
            // A signal is no matter. Anything else (a socket that was closed under us) must not become a busy loop.
            if error != zmq::Error::EINTR {
                log::error!("agent {}: waiting for events: {error}", self.engine.config.name);
                std::thread::sleep(BUSY_SLEEP);
            }
            return true;
        }
        let mut ready = items.iter().map(|item| item.get_revents() != zmq::PollEvents::empty());
        // UCX's own descriptor, whose news become events.
        if ready.next() == Some(true) {
            self.vain = self.vain.saturating_add(1);
            if news {
                self.edges.clear();
            }
        }
        let is_raised = ready.next() == Some(true);
        if has_streams && ready.next() == Some(true) {
            self.engine.streams.note_changes();
        }
        ready.any(|is_ready| is_ready) || is_raised
    }

    fn begin_shutdown(&mut self, deadline: Instant, now: Instant) {
        if self.engine.closing.is_some() {
            return;
        }
        if let Some(driver) = &mut self.driver {
            driver.shut_down(&mut Context::new(&mut self.engine, now));
        }
        self.engine.closing = Some(deadline);
        self.engine.peers.shut();
        self.lends_until = now.checked_add(deadline.saturating_duration_since(now) / 2);
        // Half of the time for operations to end by themselves, the other half for what force takes.
        let half = deadline.saturating_duration_since(now) / 2;
        self.engine.transfers.cancel_grace = self.engine.transfers.cancel_grace.min(half);
        let error = Error::new(ErrorKind::ShutDown, "the agent was shut down");
        self.engine.transfers.stop_all(&error, &mut self.engine.effects, now);
        self.engine.revoke_all();
        self.engine.dispatch(now);
    }

    /// Whether nothing is left to wait for.
    fn may_end(&mut self, now: Instant) -> bool {
        // Half of the time for peers to take what is on its way to them.
        let lends = self.engine.streams.lend() || self.engine.revocations.are_open();
        let has_borrowers = lends || self.engine.staged.is_running();
        let lends = self.lends_until.is_some_and(|until| now < until) && has_borrowers;
        let idle = self.engine.transfers.len() == 0
            && !lends
            && self.engine.events.is_empty()
            && self.driver.as_ref().is_none_or(|driver| driver.finished());
        if !idle {
            return false;
        }
        for id in self.engine.peers.ids() {
            // Known, as it has just been listed.
            let _ = self.engine.disconnect(id, now);
        }
        self.engine.peers.have_closed()
    }

    /// Frees everything, or, if UCX does not let go, leaves it alive for ever. `in_time`: no transfer is left.
    fn finish(mut self, in_time: bool) -> Result<()> {
        let now = Instant::now();
        if !in_time {
            self.shared.abandon_transfers();
            self.engine.transfers.abandon(&mut self.engine.effects);
            self.engine.dispatch(now);
        }
        if self.driver.is_some() {
            self.driver_turn();
        }
        self.driver = None;
        self.shared.publish(&mut self.engine.events);
        let limit = self.engine.closing.map_or(LAST_CHANCE, |at| at.saturating_duration_since(now)).max(LAST_CHANCE);
        let Engine { peers, worker, regions, context, config, staged, device_copies, .. } = self.engine;
        // What they have under way is waited for before its memory is given up.
        drop((staged, device_copies));
        drop(peers);
        match worker.close(limit) {
            Ok(()) if in_time => Ok(()),
            Ok(()) => Err(Error::new(
                ErrorKind::Timeout,
                format!("agent {}: transfers were still in flight when the shutdown's time was up", config.name),
            )),
            Err(error) => {
                // UCX may still touch registered memory.
                std::mem::forget(regions);
                std::mem::forget(context);
                Err(Error::new(
                    ErrorKind::Timeout,
                    format!("agent {}: {error}; registered memory must stay alive", config.name),
                ))
            }
        }
    }
}
