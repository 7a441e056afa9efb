//! An engine with its driver, and its turns: what is done between two sleeps, by the progress thread or by a caller in its
//! place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Engine;
use super::driver::{Context, Driver};
use crate::agent::command::{Command, Shared};
use crate::agent::core::request::TransferRequest;
use crate::agent::thread::callers::Callers;
use crate::error::{Error, ErrorKind, Result};

/// How long UCX may be driven before commands and timers are checked and further requests are sent, while no message
/// comes. With CMA, one progress call copies up to about 4 MiB.
const PROGRESS_TIME: Duration = Duration::from_micros(100);
/// Commands served per turn.
const COMMANDS_PER_TURN: usize = 256;
/// The time that UCX gets to end the last operations when a shutdown's is up.
const LAST_CHANCE: Duration = Duration::from_millis(100);

/// What threads use in turn.
pub(crate) struct Driven {
    pub(super) engine: Engine,
    pub(super) driver: Option<Box<dyn Driver>>,
    shared: Arc<Shared>,
    callers: Arc<Callers>,
    /// When the driver wants its next turn at the latest.
    pub(super) wish: Option<Instant>,
    /// When anything happened last.
    pub(super) progressed_at: Instant,
    /// While the agent shuts down: until when devices bring what peers have asked for.
    serves_until: Option<Instant>,
}

/// What came of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turned {
    /// Something was done.
    Any,
    Nothing,
    /// The agent's shutdown is over, in time or not.
    Over {
        in_time: bool,
    },
}

impl Driven {
    pub(super) fn new(engine: Engine, driver: Option<Box<dyn Driver>>, callers: &Arc<Callers>) -> Self {
        let shared = Arc::clone(&engine.shared);
        let callers = Arc::clone(callers);
        Driven { engine, driver, shared, callers, wish: None, progressed_at: Instant::now(), serves_until: None }
    }

    /// The progress thread's turn. `is_woken`: the driver is to have one too.
    pub(super) fn turn(&mut self, is_woken: bool) -> Turned {
        self.engine.stats.turns += 1;
        // Commands that woke the thread go out before UCX is driven, which takes its time.
        let mut any = self.serve_commands(Instant::now());
        if any {
            self.engine.post_transfers();
        }
        let (progressed, now) = self.progress();
        any |= progressed;
        self.engine.check_timers(now);
        any |= self.engine.post_transfers();
        if self.driver.is_some() {
            if any || is_woken || !self.engine.events.is_empty() || self.wish.is_some_and(|at| at <= now) {
                self.wish = self.driver_turn();
                // What it started is posted before the loop sleeps.
                any |= self.engine.post_transfers() || !self.engine.events.is_empty();
            }
        } else {
            self.shared.publish(&mut self.engine.events);
        }
        if let Some(deadline) = self.engine.closing {
            if self.may_end(now) {
                return Turned::Over { in_time: true };
            }
            if now >= deadline {
                return Turned::Over { in_time: false };
            }
        }
        if !any {
            return Turned::Nothing;
        }
        // Posting has taken its time.
        self.progressed_at = Instant::now();
        Turned::Any
    }

    /// Whether all that there is to do takes some microseconds, so that a caller may do it on its thread: no driver, which
    /// may take its time, no device memory, for which a thread needs CUDA's context, nothing long to move, no shutdown, and
    /// no lost data port, for which the worker is replaced on whose event fd the progress thread would go on sleeping.
    pub(super) fn is_light(&self) -> bool {
        let engine = &self.engine;
        let has_driver = self.driver.is_some() || engine.closing.is_some();
        let keeps_worker = engine.data_port.is_open();
        !has_driver && keeps_worker && !engine.has_devices && engine.transfers.are_light()
    }

    /// The turn of a caller that polls. What would take long is left to the progress thread. Where that has not stood aside,
    /// it is woken behind what was done, to see to the timers and operations that came of it; what comes to UCX later wakes
    /// it anyway: UCX is armed, or its event fd is readable, whoever takes what has come.
    pub(crate) fn poll(&mut self, now: Instant) {
        if !self.is_light() {
            self.callers.leave_alone(now);
            if self.callers.drive() {
                self.hand_over();
            }
            return;
        }
        self.serve_light(now);
        self.engine.post_transfers();
        let (any, now) = self.progress();
        if any {
            self.progressed_at = now;
        }
        self.engine.check_timers(now);
        self.engine.post_transfers();
        if (any || !self.engine.events.is_empty()) && !self.callers.drive() {
            self.shared.waker.wake();
        }
        self.shared.publish(&mut self.engine.events);
    }

    /// Makes a caller's transfer on its thread, if it is a copy within this host that takes some microseconds and nothing
    /// that was asked for before is waiting. Returns whether it is over.
    pub(crate) fn copy_at_once(&mut self, request: &TransferRequest) -> bool {
        let is_over = self.is_light() && !self.shared.has_commands() && self.engine.copy_at_once(request);
        self.shared.publish(&mut self.engine.events);
        is_over
    }

    /// Serves on a caller's thread what it has queued just now. Returns whether the progress thread has to do with it.
    pub(crate) fn serve_at_once(&mut self) -> bool {
        if !self.is_light() {
            return true;
        }
        let now = Instant::now();
        self.serve_light(now);
        self.engine.post_transfers();
        self.engine.reap_copies(now);
        self.engine.reap_completions(now);
        self.shared.publish(&mut self.engine.events);
        // The caller that polls drives what is under way. UCX stays armed: nothing was taken from it.
        let is_under_way = self.engine.transfers.len() > 0 || self.engine.worker.in_flight() > 0;
        let is_seen_to = self.callers.drive() || !is_under_way;
        self.shared.has_commands() || !is_seen_to
    }

    /// Lets the progress thread drive the engine again.
    fn hand_over(&mut self) {
        self.callers.leave();
        self.shared.waker.wake();
    }

    /// Drives UCX until it is idle, has brought a message, or has had its time, and takes what came of it.
    fn progress(&mut self) -> (bool, Instant) {
        let begin = Instant::now();
        let (mut any, mut now) = (false, begin);
        while self.engine.worker.progress() {
            any = true;
            now = Instant::now();
            // Messages that have come are answered before UCX looks for more, which over TCP takes a system call.
            if self.engine.worker.has_messages() || now.saturating_duration_since(begin) >= PROGRESS_TIME {
                break;
            }
        }
        // Failures first, so that the operations that they end are the lost peer's.
        self.engine.reap_failed_endpoints(now);
        self.engine.reap_completions(now);
        self.engine.reap_copies(now);
        any |= self.engine.reap_device_copies(now) | self.engine.reap_staged(now);
        self.engine.receive_messages(now);
        (any, now)
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

    /// Serves commands up to the first one that may take long.
    fn serve_light(&mut self, now: Instant) {
        while let Some(command) = self.shared.next_command_if(Command::is_light) {
            self.engine.serve(command, now);
        }
    }

    fn driver_turn(&mut self) -> Option<Instant> {
        let mut context = Context::new(&mut self.engine, Instant::now());
        self.driver.as_mut().and_then(|driver| driver.turn(&mut context))
    }

    fn begin_shutdown(&mut self, deadline: Instant, now: Instant) {
        if self.engine.closing.is_some() {
            return;
        }
        if let Some(driver) = &mut self.driver {
            driver.shut_down(&mut Context::new(&mut self.engine, now));
        }
        self.engine.closing = Some(deadline);
        self.serves_until = now.checked_add(deadline.saturating_duration_since(now) / 2);
        // Half of the time for operations to end by themselves, the other half for what force takes.
        let half = deadline.saturating_duration_since(now) / 2;
        self.engine.transfers.cancel_grace = self.engine.transfers.cancel_grace.min(half);
        self.engine.peers.shut(now.checked_add(self.engine.transfers.cancel_grace));
        let error = Error::new(ErrorKind::ShutDown, "the agent was shut down");
        self.engine.transfers.stop_all(&error, &mut self.engine.effects, now);
        self.engine.revoke_all();
        self.engine.dispatch(now);
        self.engine.tell_uses();
        self.engine.dispatch(now);
    }

    /// Whether nothing is left to wait for.
    fn may_end(&mut self, now: Instant) -> bool {
        // Half of the time for what peers have asked for.
        let serves = self.engine.staged.is_running() && self.serves_until.is_some_and(|until| now < until);
        // And all of it for those that may copy its memory: nobody else can say that they do not any more.
        let idle = self.engine.transfers.len() == 0
            && !serves
            && self.engine.holds.holders().next().is_none()
            && self.engine.events.is_empty()
            && self.driver.as_ref().is_none_or(|driver| driver.finished());
        if !idle {
            return false;
        }
        for id in self.engine.peers.ids() {
            if !self.engine.peers.awaits_answer(id, now) {
                // Known, as it has just been listed.
                let _ = self.engine.disconnect(id, now);
            }
        }
        self.engine.peers.len() == 0 && self.engine.peers.have_closed()
    }

    /// Frees everything, or, if UCX does not release it, leaves it alive for ever. `in_time`: no transfer is left.
    pub(super) fn finish(mut self, in_time: bool) -> Result<()> {
        let now = Instant::now();
        let mut why = "transfers were still in flight".to_owned();
        if !in_time {
            let holders: Vec<&str> = self.engine.holds.holders().map(|peer| self.engine.peers.name(peer)).collect();
            if !holders.is_empty() {
                why = format!(
                    "the agents {holders:?}, which may copy its memory, had not said that they do not any more"
                );
            }
            self.engine.regions.abandon();
            self.shared.abandon_transfers();
            self.engine.transfers.abandon(&mut self.engine.effects);
            self.engine.dispatch(now);
        }
        if self.driver.is_some() {
            self.driver_turn();
        }
        self.driver = None;
        self.shared.publish(&mut self.engine.events);
        let closing = self.engine.closing;
        let Engine { mut peers, worker, regions, context, config, mut staged, mut device_copies, copy_pool, .. } =
            self.engine;
        // Their copies end before the memory is given up.
        let is_staged = staged.finish();
        let is_copied = device_copies.finish();
        let is_over = is_staged & is_copied;
        // A peer would take the end of the connection for the end of what is copied of it.
        let copied = peers.take_copied(|id| copy_pool.is_copying(id) || !is_copied && device_copies.is_copying(id));
        drop(peers);
        drop((staged, device_copies, copy_pool));
        let left = closing.map_or(LAST_CHANCE, |at| at.saturating_duration_since(Instant::now()));
        if !copied.is_empty() {
            while worker.progress() {}
            std::mem::forget((copied, worker, regions, context));
            return Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "agent {}: a copy of another process's memory did not end before the shutdown's time was up; registered \
                     memory must stay alive",
                    config.name
                ),
            ));
        }
        match worker.close(left.max(LAST_CHANCE)) {
            Ok(()) if !is_over => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "agent {}: the CUDA driver did not let it wait for what a device copies; registered memory must stay alive",
                    config.name
                ),
            )),
            Ok(()) if in_time => Ok(()),
            Ok(()) => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "agent {}: {why} when the shutdown's time was up; registered memory must stay alive",
                    config.name
                ),
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]
mod tests {
    use super::super::tests;
    use super::*;
    use crate::agent::core::event::{Direction, Event};
    use crate::agent::core::ids::{PeerId, RegionId, TransferId};
    use crate::agent::core::limits::LIGHT_BYTES;
    use crate::agent::core::reply::answer;
    use crate::agent::core::stats::AgentStats;
    use crate::agent::thread::callers::Polled;
    use crate::agent::{Agent, AgentConfig, Transport};
    use crate::mem::MemoryRange;
    use crate::proto::ids::Incarnation;
    use crate::proto::plan::{BlockPair, CopyPlan, Segment};

    const LEN: usize = 4 * LIGHT_BYTES as usize;

    #[test]
    fn memory_in_use_at_the_deadline_is_not_free() {
        let other = Agent::start(tests::config("b", Transport::Tcp)).unwrap();
        other.register(MemoryRange::leaked(3 * tests::LEN)).unwrap();
        let (mut engine, peer) = tests::reader(Transport::Tcp, &other);
        let id = tests::read(&mut engine, peer);
        let _under_way = tests::begin_one(&mut engine, peer, id);
        let region = RegionId::of_index(engine.shared.live.ids.salt(), 0);
        let caller = tests::deregister(&mut engine, region);
        Driven::new(engine, None, &Arc::new(Callers::new(Instant::now()))).finish(false).unwrap_err();
        let error = caller.wait(Duration::ZERO).unwrap().unwrap_err();
        assert!(error.message().contains("must stay alive"), "{error}");
    }

    /// An engine that no thread drives, connected to an agent of which it knows region 0.
    struct Pair {
        driven: Driven,
        peer: PeerId,
        _other: Agent,
        far: MemoryRange,
        near: MemoryRange,
    }

    impl Pair {
        fn new(transport: Transport) -> Pair {
            let config =
                |name: &str| AgentConfig { name: name.to_owned(), transport, warm_up: false, ..AgentConfig::default() };
            let other = Agent::start(config("b")).unwrap();
            let far = MemoryRange::leaked_with((0..LEN).map(|at| (at * 31 + at / 251) as u8).collect());
            other.register(far).unwrap();
            let shared = Arc::new(Shared::new(1).unwrap());
            let mut engine = Engine::new(config("a"), Incarnation(77), &shared).unwrap();
            let near = MemoryRange::leaked(LEN);
            engine.register(near).unwrap();
            let peer = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
            let mut pair = Pair {
                driven: Driven::new(engine, None, &Arc::new(Callers::new(Instant::now()))),
                peer,
                _other: other,
                far,
                near,
            };
            pair.until("the peer has answered", |driven, _| driven.engine.peers.get(peer).unwrap().is_ready());
            pair
        }

        /// Turns as of the progress thread, until something holds.
        fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Driven, Vec<Event>) -> bool) {
            let end = Instant::now() + Duration::from_secs(120);
            loop {
                let events = std::iter::from_fn(|| self.driven.shared.poll_event()).collect();
                if holds(&mut self.driven, events) {
                    return;
                }
                assert!(Instant::now() < end, "not within two minutes: {what}");
                assert_ne!(self.driven.turn(false), Turned::Over { in_time: true });
            }
        }

        /// Queues a read of `len` bytes, as the handle does.
        fn read(&self, len: usize) -> TransferId {
            let shared = &self.driven.shared;
            let id = shared.live.ids.transfer().unwrap();
            let segment = Segment {
                list: 0,
                local_region: 0,
                remote_region: 0,
                local_offset: 0,
                remote_offset: 4096,
                local_stride: 0,
                remote_stride: 0,
                len: len as u64,
            };
            let lists = vec![BlockPair { local: vec![0].into(), remote: vec![0].into() }];
            let plan = CopyPlan { segments: [segment].into(), lists };
            shared.live.lock().transfers.insert(id, (self.peer, 0));
            let (peer, direction, message) = (self.peer, Direction::Read, None);
            shared.queue(Command::Transfer(TransferRequest { id, peer, direction, plan, message, user_data: 0 }));
            id
        }

        fn check(&self, event: Option<Event>, read: TransferId, len: usize) {
            let Some(Event::TransferDone { id, result: Ok(()), .. }) = event else { panic!("{event:?}") };
            assert_eq!(id, read);
            assert!(self.near.leaked_bytes().starts_with(&self.far.leaked_bytes()[4096..][..len]));
        }
    }

    #[test]
    fn light_transfer_is_over_when_the_caller_returns() {
        let mut pair = Pair::new(Transport::Shm);
        let read = pair.read(4096);
        assert!(!pair.driven.serve_at_once(), "nothing is left to the progress thread");
        let event = pair.driven.shared.poll_event();
        pair.check(event, read, 4096);
        let read = pair.read(8192);
        let before = pair.driven.engine.stats();
        let Some(Command::Transfer(mut request)) = pair.driven.shared.next_command() else { panic!("none") };
        assert!(pair.driven.copy_at_once(&request));
        let event = pair.driven.shared.poll_event();
        pair.check(event, read, 8192);
        let after = pair.driven.engine.stats();
        let done = |stats: &AgentStats| {
            [stats.transfers_done, stats.bytes_read, stats.copied_bytes, stats.operations, stats.transfers]
        };
        let [before, after] = [done(&before), done(&after)];
        assert_eq!(after, [before[0] + 1, before[1] + 8192, before[2] + 8192, before[3] + 1, 0]);
        // What is wrong with it is found where others begin.
        for wrong in [(1, 0, 0), (0, 1, 0), (0, 0, LEN as u64)] {
            let segment = request.plan.segments[0];
            let (local_region, remote_region, remote_offset) = wrong;
            let damaged = Segment { local_region, remote_region, remote_offset, ..segment };
            request.plan.segments = [damaged].into();
            assert!(!pair.driven.copy_at_once(&request), "{wrong:?}");
            request.plan.segments = [segment].into();
        }
        assert!(pair.driven.copy_at_once(&request));
        pair.driven.shared.queue(Command::Disconnect { peer: pair.peer });
        assert!(!pair.driven.copy_at_once(&request), "what was asked for before comes first");
    }

    #[test]
    fn long_transfers_keep_their_place() {
        let mut pair = Pair::new(Transport::Shm);
        let (reply, answered) = answer();
        pair.driven.shared.queue(Command::Metadata { reply });
        let light = pair.read(4096);
        assert!(pair.driven.serve_at_once());
        assert!(pair.driven.shared.poll_event().is_none());
        // The thread serves both.
        pair.driven.shared.waker.wake();
        let mut seen = Vec::new();
        pair.until("the read is done", |_, events| {
            seen.extend(events);
            !seen.is_empty()
        });
        answered.wait(Duration::ZERO).unwrap().unwrap();
        pair.check(seen.pop(), light, 4096);
        let heavy = pair.read(LEN - 4096);
        assert!(pair.driven.serve_at_once());
        assert!(pair.driven.shared.has_commands(), "it is served by nobody else");
        pair.driven.shared.waker.wake();
        assert_eq!(pair.driven.turn(false), Turned::Any);
        pair.until("the long read is done", |_, events| {
            seen.extend(events);
            !seen.is_empty()
        });
        pair.check(seen.pop(), heavy, LEN - 4096);
    }

    #[test]
    fn polling_caller_drives_light_work_only() {
        let mut pair = Pair::new(Transport::Tcp);
        for stands_aside in [false, true] {
            if stands_aside {
                pair.driven.callers.enter();
            }
            let _ = pair.driven.shared.waker.take();
            let read = pair.read(4096);
            assert_eq!(
                pair.driven.serve_at_once(),
                !stands_aside,
                "the thread is to wait for the answer if nobody polls"
            );
            let end = Instant::now() + Duration::from_secs(120);
            let event = std::iter::repeat_with(|| {
                pair.driven.poll(Instant::now());
                pair.driven.shared.poll_event()
            })
            .take_while(|_| Instant::now() < end)
            .find_map(|event| event);
            pair.check(event, read, 4096);
            assert_eq!(pair.driven.shared.waker.take(), !stands_aside, "a thread that sleeps is told what was done");
        }
        pair.read(64);
        assert!(!pair.driven.serve_at_once(), "the caller goes on polling");
        let _ = pair.driven.shared.waker.take();
        pair.read(LEN - 4096);
        assert!(pair.driven.serve_at_once(), "the thread is woken for it");
        pair.until("both reads are over", |driven, _| driven.engine.transfers.len() == 0);
        pair.driven.callers.enter();
        let _ = pair.driven.shared.waker.take();
        pair.driven.engine.has_devices = true;
        let now = Instant::now();
        pair.driven.poll(now);
        assert!(!pair.driven.callers.drive() && pair.driven.shared.waker.take(), "the thread takes over");
        // For a while, callers do not even look.
        assert!((0..1000).all(|_| pair.driven.callers.poll(now) == Polled::Nothing));
    }

    /// The progress thread sleeps on the event fd of the worker that would be replaced.
    #[test]
    fn callers_do_not_reopen_the_data_port() {
        let mut pair = Pair::new(Transport::Tcp);
        let now = Instant::now();
        pair.driven.engine.give_up_peers(now);
        pair.until("the connections to have ended", |driven, _| {
            driven.engine.data_port.look_at(Instant::now() + Duration::from_secs(3600));
            driven.engine.peers.have_closed() && driven.engine.worker.in_flight() == 0
        });
        pair.driven.engine.data_port.look_at(now);
        pair.driven.callers.enter();
        let _ = pair.driven.shared.waker.take();
        pair.driven.poll(now);
        assert_eq!(pair.driven.engine.workers, 0, "a caller has replaced the worker");
        assert!(pair.driven.shared.waker.take(), "the thread is woken for it");
        assert_ne!(pair.driven.turn(false), Turned::Over { in_time: true });
        assert_eq!(pair.driven.engine.workers, 2);
        assert!(pair.driven.is_light());
    }
}
