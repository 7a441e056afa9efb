//! The port at which UCX listens, and what keeps it open.
//!
//! UCX listens on each of its TCP devices. It chooses the ports itself, tries for ever where those that it may take are used
//! up, and closes a socket for good when it cannot accept a connection, as without a free descriptor. So the agent chooses:
//! one port, which is free at all addresses of this host. It keeps some descriptors in reserve, ends connections of strangers
//! that say nothing when descriptors become few, and looks now and then whether UCX still listens. If not, it gives its peers
//! up and makes a new worker at the same port, because peers have the port in metadata that was handed out long ago. A broken
//! connection heals by a new handshake.
//!
//! The old worker must be gone first. UCX binds its sockets without SO_REUSEADDR, so a connection that was accepted at the port
//! keeps the port taken. A connection stays while memory of its peer is being copied, because the peer takes its end for the
//! end of the copy. So a copy that hangs keeps the port closed, and the log names the peer.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::Engine;
use super::ucx_settings::{self, Opened};
use crate::agent::core::config::AgentConfig;
use crate::agent::core::frame::{AM_ID, FRAME_BYTES};
use crate::agent::core::limits::MAX_MESSAGE_BYTES;
use crate::agent::rpc::client::{Client, Placer};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::mem::ucx_error;
use crate::net::{is_reachable, local_addresses};
use crate::secret::sealed_len;
use crate::sys::limits::{open_files, raise_open_files};
use crate::sys::ports::{Listening, end_silent, forget_at_close, free_port, listening_at};
use crate::ucx::{Context, ContextConfig, MessageSink, Worker, WorkerOptions};

/// How often the port is checked.
const LOOK: Duration = Duration::from_secs(2);
/// How often, while connections end so that it can be opened anew.
const ENDING_LOOK: Duration = Duration::from_millis(10);
/// How long connections may take to end before the log says which do not, and the looks become rare.
const ENDING_PATIENCE: Duration = Duration::from_secs(5);
/// How long until the next try to open it anew.
const RETRY: Duration = Duration::from_secs(1);
/// Ports that others may take between the look and UCX's own.
const TRIES: usize = 16;
/// How often a range is looked through where all its ports seem to be used: others look too, and hold a port meanwhile.
const RANGE_TRIES: usize = 20;
const RANGE_WAIT: Duration = Duration::from_millis(50);
/// Descriptors that the agent keeps for itself, for what follows when there are no others.
const RESERVE: usize = 16;
/// Fewer free descriptors than this are few.
const FEW: u64 = 96;
/// Bytes that every peer of UCX's protocol sends at once, and the time that a stranger may take for more.
const MAGIC_BYTES: u64 = 8;
const SILENCE: Duration = Duration::from_secs(1);

/// The state of the port.
enum PortState {
    Open,
    /// Connections have been ending since then; when they have ended it is opened anew.
    Lost {
        since: Instant,
    },
}

/// The port, and what UCX listens with.
pub(super) struct DataPort {
    /// `None` where UCX chooses.
    port: Option<u16>,
    /// The context's settings.
    asked: ContextConfig,
    listeners: Vec<Listening>,
    /// Whether UCX listens at the port, though its sockets may not have been found.
    has_listened: bool,
    state: PortState,
    next_look: Instant,
    reserve: Vec<OwnedFd>,
    /// Whether descriptors are few, as was said in the log.
    is_short: bool,
    /// Sockets that UCX has closed and goes on knowing by their numbers: it makes no new one of the same number.
    closed: Vec<Listening>,
    /// Such numbers, kept from being used again.
    occupied: Vec<OwnedFd>,
    log: LogLimit,
}

/// The addresses that a port must be free at: all those by which this host is reached.
fn addresses() -> Vec<IpAddr> {
    let found = local_addresses().unwrap_or_default().into_iter().map(|address| address.ip);
    found.filter(|ip| ip.is_loopback() || is_reachable(*ip)).collect()
}

/// Chooses a port of the configured range, none of `taken`; `None` leaves it to UCX.
///
/// # Errors
/// [`ErrorKind::Exhausted`] where every port of the range is in use.
pub(super) fn choose(config: &AgentConfig, taken: &BTreeSet<u16>) -> Result<Option<u16>> {
    let addresses = addresses();
    let range = config.tcp_ports();
    let start = getrandom::u64().unwrap_or_default();
    let find = || free_port(&addresses, range.as_ref(), start, |port| !taken.contains(&port));
    match &range {
        None => Ok(find()),
        Some(range) => find_patiently(find).map(Some).ok_or_else(|| used_up(range, &addresses)),
    }
}

fn find_patiently(find: impl Fn() -> Option<u16>) -> Option<u16> {
    (0..RANGE_TRIES).find_map(|tries| {
        if tries > 0 {
            sleep(RANGE_WAIT);
        }
        find()
    })
}

fn used_up(range: &RangeInclusive<u16>, addresses: &[IpAddr]) -> Error {
    let at: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    Error::new(
        ErrorKind::Exhausted,
        format!(
            "every port of UCX_TCP_PORT_RANGE, {}-{}, is in use at {}: each agent, of which an engine has one for each rank, \
             needs one; give a wider range, or end what has the ports",
            range.start(),
            range.end(),
            at.join(" or ")
        ),
    )
}

/// Opens UCX at a port of the agent's choice, with a worker that `make` makes of a context.
///
/// Another port is tried where UCX refuses one, as when somebody else has taken it.
///
/// # Errors
/// Those of [`choose`] and `make`; of UCX, the last one.
pub(super) fn open(
    config: &AgentConfig,
    is_keyed: bool,
    make: impl Fn(&Arc<Context>) -> Result<Worker>,
) -> Result<(Arc<Context>, Worker, DataPort)> {
    let has_others = config.tcp_ports().is_none_or(|range| range.len() > 1);
    let is_taken = |port: u16| free_port(&addresses(), Some(&(port..=port)), 0, |_| true).is_none();
    let (mut taken, mut refused) = (BTreeSet::new(), None);
    loop {
        let port = choose(config, &taken).map_err(|used_up| refused.take().unwrap_or(used_up))?;
        let Opened { context, asked, .. } = ucx_settings::open(config, is_keyed, port)?;
        match (make(&context), port) {
            (Ok(worker), _) => return Ok((context, worker, DataPort::new(port, asked))),
            // Another socket may have been faster: for a moment, or at an address of UCX's that is not checked.
            (Err(error), Some(port))
                if error.kind() == ErrorKind::Ucx && taken.len() < TRIES && (has_others || is_taken(port)) =>
            {
                log::info!("agent {}: another port than {port} is tried: {error}", config.name);
                taken.insert(port);
                refused = has_others.then_some(error);
            }
            (Err(error), _) => return Err(error),
        }
    }
}

/// Makes an agent's worker.
pub(super) fn make_worker(
    config: &AgentConfig,
    is_keyed: bool,
    rpc: &Rc<RefCell<Client>>,
    context: &Arc<Context>,
) -> Result<Worker> {
    let longest = MAX_MESSAGE_BYTES + FRAME_BYTES;
    let max_message = if is_keyed { sealed_len(longest) } else { MAX_MESSAGE_BYTES };
    let options = WorkerOptions { name: config.name.clone(), max_message };
    let worker = Worker::with_options(context, &options).map_err(ucx_error)?;
    // Sealed messages must be opened first.
    let sink = (!is_keyed).then(|| Rc::new(Placer(Rc::clone(rpc))) as Rc<dyn MessageSink>);
    worker.accept_messages(AM_ID, sink).map_err(ucx_error)?;
    Ok(worker)
}

impl DataPort {
    fn new(port: Option<u16>, asked: ContextConfig) -> Self {
        let listeners = port.map(listening_at).unwrap_or_default();
        let mut new = DataPort {
            port,
            asked,
            has_listened: !listeners.is_empty(),
            listeners,
            state: PortState::Open,
            next_look: Instant::now() + LOOK,
            reserve: Vec::new(),
            is_short: false,
            closed: Vec::new(),
            occupied: Vec::new(),
            log: LogLimit::default(),
        };
        new.keep_reserve();
        new
    }

    /// A context that listens at any port, for a worker beside the agent's.
    ///
    /// # Errors
    /// UCX's.
    pub(super) fn spare_context(&self) -> Result<Arc<Context>> {
        let mut asked = self.asked.clone();
        ucx_settings::set_port(&mut asked, None);
        Context::new(&asked).map_err(ucx_error)
    }

    /// Whether UCX listens, as far as is known. Otherwise the worker is about to be replaced.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, PortState::Open)
    }

    /// Has the port checked then.
    #[cfg(test)]
    pub(super) fn look_at(&mut self, at: Instant) {
        self.next_look = at;
    }

    /// Finds the sockets by which UCX listens, for which descriptors must be free.
    fn find_listeners(&mut self) {
        self.listeners = self.port.map(listening_at).unwrap_or_default();
    }

    /// When the port is checked next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.has_listened.then_some(self.next_look)
    }

    fn keep_reserve(&mut self) {
        let missing = RESERVE.saturating_sub(self.reserve.len());
        let more = (0..missing).map_while(|_| File::open("/dev/null").ok().map(OwnedFd::from));
        self.reserve.extend(more);
    }

    /// Makes room where descriptors are few.
    fn relieve(&mut self, name: &str, now: Instant) {
        // The system gives the lowest number that is free.
        let lowest = File::open("/dev/null").map_or(u64::MAX, |file| file.as_raw_fd().unsigned_abs().into());
        if open_files().saturating_sub(lowest) > FEW {
            self.is_short = false;
            return self.keep_reserve();
        }
        raise_open_files();
        self.reserve.clear();
        let ended = self.port.map_or(0, |port| end_silent(port, MAGIC_BYTES, SILENCE));
        let has_news = ended > 0 || !self.is_short;
        self.is_short = true;
        if has_news && let Some(left_out) = self.log.pass(now) {
            log::warn!(
                "agent {name}: this process has few of the {} files left that it may open; {ended} connections to the data \
                 port that said nothing were ended; raise the limit (ulimit -n) ({left_out} similar lines suppressed)",
                open_files()
            );
        }
    }

    /// Keeps numbers that UCX goes on knowing from being used again; those that are taken now, once they are free.
    fn occupy(&mut self) {
        let occupied = &mut self.occupied;
        self.closed.retain(|closed| match closed.occupy() {
            Some(number) => {
                occupied.push(number);
                false
            }
            None => true,
        });
    }

    fn lost(&self) -> Vec<&Listening> {
        self.listeners.iter().filter(|listener| !listener.is_open()).collect()
    }
}

impl Engine {
    /// Checks the port and opens it anew where UCX has closed it.
    pub(super) fn check_data_port(&mut self, now: Instant) {
        if self.closing.is_some() || self.data_port.deadline().is_none_or(|at| now < at) {
            return;
        }
        match self.data_port.state {
            PortState::Open => {
                self.data_port.next_look = now + LOOK;
                self.data_port.relieve(&self.config.name, now);
                self.data_port.occupy();
                if self.data_port.listeners.is_empty() {
                    self.data_port.find_listeners();
                }
                if !self.data_port.lost().is_empty() {
                    self.give_up_peers(now);
                }
            }
            PortState::Lost { since } => {
                let is_over = self.worker.in_flight() == 0 && self.peers.have_closed();
                if is_over && self.transfers.in_flight().operations == 0 {
                    self.reopen_data_port(now);
                } else if now.saturating_duration_since(since) < ENDING_PATIENCE {
                    self.data_port.next_look = now + ENDING_LOOK;
                } else {
                    self.data_port.next_look = now + RETRY;
                    self.tell_endless(now);
                }
            }
        }
    }

    /// Says in the log which connections do not end.
    fn tell_endless(&mut self, now: Instant) {
        let Some(left_out) = self.data_port.log.pass(now) else { return };
        let agents = self.peers.leaving_names();
        let waits_for = if agents.is_empty() {
            "operations of UCX have not ended".to_owned()
        } else {
            format!("copies of memory of the agents {agents:?} have not ended; if their processes hang, end those")
        };
        log::error!(
            "agent {}: the data port cannot be opened anew yet, so no peer can connect: {waits_for} ({left_out} such lines \
             left out)",
            self.config.name
        );
    }

    /// Gives all peers up, so that the worker can be replaced.
    pub(super) fn give_up_peers(&mut self, now: Instant) {
        let lost: Vec<String> = self.data_port.lost().iter().map(|listener| listener.address.to_string()).collect();
        log::error!(
            "agent {}: UCX listens no more at {}, as when a process can open no more files; its connections are given up, and \
             the data port is opened anew",
            self.config.name,
            lost.join(" and ")
        );
        let closed: Vec<Listening> = self.data_port.lost().into_iter().cloned().collect();
        self.data_port.closed.extend(closed);
        if let Some(port) = self.data_port.port {
            forget_at_close(port);
        }
        self.data_port.state = PortState::Lost { since: now };
        self.peers.pause(true);
        let error = Error::new(
            ErrorKind::PeerDied,
            "this agent's data port was lost, and its connections were given up to open it anew; connect again",
        );
        for id in self.peers.ids() {
            self.effects.lose(id, error.clone());
        }
        self.dispatch(now);
    }

    /// Replaces the worker, which nothing uses any more, by one that listens at the same port.
    fn reopen_data_port(&mut self, now: Instant) {
        // UCX takes some.
        self.data_port.reserve.clear();
        self.data_port.occupy();
        match self.replace_worker() {
            Ok(()) => {
                log::warn!("agent {}: the data port is open again", self.config.name);
                self.data_port.find_listeners();
                self.data_port.state = PortState::Open;
                // The progress thread needs a descriptor for the new worker, before the reserve is taken at the next look.
                self.data_port.next_look = now + LOOK;
                self.peers.pause(false);
            }
            Err(error) => {
                if let Some(left_out) = self.data_port.log.pass(now) {
                    log::error!(
                        "agent {}: the data port cannot be opened anew: {error}; it is tried again ({left_out} such lines \
                         left out)",
                        self.config.name
                    );
                }
                self.data_port.next_look = now + RETRY;
            }
        }
    }

    fn replace_worker(&mut self) -> Result<()> {
        if let Some(port) = self.data_port.port {
            forget_at_close(port);
        }
        // One for the time in which neither has the port.
        let interim = self.make_worker(&self.data_port.spare_context()?)?;
        self.install(interim);
        // Numbers that connections of the old one had.
        self.data_port.occupy();
        let worker = self.make_worker(&self.context)?;
        self.install(worker);
        Ok(())
    }

    fn make_worker(&self, context: &Arc<Context>) -> Result<Worker> {
        make_worker(&self.config, self.peers.are_keyed(), &self.rpc, context)
    }

    /// Ends the worker that there is, and takes another one.
    fn install(&mut self, worker: Worker) {
        // The new one counts from 0.
        self.stats.messages_dropped += self.worker.dropped_messages();
        self.refused = 0;
        drop(std::mem::replace(&mut self.worker, worker));
        self.workers += 1;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;
    use std::net::TcpListener;

    use super::super::tests::{config, drive, other, reader};
    use super::*;
    use crate::agent::Transport;

    #[test]
    fn copy_that_hangs_makes_looks_rare() {
        let other = other(Transport::Tcp);
        let (mut engine, peer) = reader(Transport::Tcp, &other);
        let now = Instant::now();
        // As if memory of it was being copied.
        let (peers, mut io) = engine.peers(now);
        peers.lose(peer, Error::new(ErrorKind::PeerDied, "test"), true, &mut io);
        engine.give_up_peers(now);
        assert_eq!(engine.peers.leaving_names().into_iter().collect::<Vec<_>>(), ["b"]);
        let look = |engine: &mut Engine, at: Instant| {
            engine.data_port.next_look = at;
            engine.check_data_port(at);
            assert_eq!(engine.workers, 0, "a worker was replaced that is in use");
            engine.data_port.next_look - at
        };
        assert_eq!(look(&mut engine, now), ENDING_LOOK);
        assert_eq!(look(&mut engine, now + ENDING_PATIENCE), RETRY);
        assert!(engine.data_port.log.pass(now + ENDING_PATIENCE).is_none(), "nothing was said in the log");
        // It is opened anew when the copy has ended.
        let (peers, mut io) = engine.peers(now);
        peers.leave(peer, &mut io);
        drive(&mut engine, |engine| {
            engine.check_data_port(Instant::now() + ENDING_PATIENCE + RETRY);
            engine.workers == 2
        });
        assert_eq!(engine.data_port.reserve.len(), 0, "the progress thread needs a descriptor for the new worker");
        let next_look = engine.data_port.next_look;
        engine.check_data_port(next_look);
        assert_eq!(engine.data_port.reserve.len(), RESERVE);
        let again = engine.connect(&other.metadata().unwrap(), Instant::now()).unwrap();
        drive(&mut engine, |engine| engine.peers.get(again).unwrap().is_ready());
    }

    #[test]
    fn sockets_that_were_not_found_are_sought_again() {
        let other = other(Transport::Tcp);
        let (mut engine, _) = reader(Transport::Tcp, &other);
        // As where the port was opened anew with the last descriptor.
        engine.data_port.listeners.clear();
        let at = engine.data_port.deadline().unwrap();
        engine.check_data_port(at);
        assert!(!engine.data_port.listeners.is_empty());
    }

    #[test]
    fn dropped_messages_count_on_with_a_new_worker() {
        let other = other(Transport::Tcp);
        let (mut engine, _) = reader(Transport::Tcp, &other);
        let context = engine.data_port.spare_context().unwrap();
        let stranger = Worker::with_options(&context, &WorkerOptions::default()).unwrap();
        let endpoint = stranger.connect(&engine.metadata().address, "a").unwrap();
        endpoint.send_am(AM_ID, b"", vec![0; MAX_MESSAGE_BYTES + 1], 1).unwrap();
        drive(&mut engine, |engine| {
            stranger.progress();
            engine.stats().messages_dropped == 1
        });
        engine.refused = 1;
        drop((endpoint, stranger));
        let interim = engine.make_worker(&context).unwrap();
        engine.install(interim);
        assert_eq!(engine.stats().messages_dropped, 1);
        // None of the new one's.
        assert_eq!(engine.refused, engine.worker.refused_announcements());
    }

    #[test]
    fn port_taken_for_a_moment_is_left_for_another() {
        // Below the ports that the system gives to other tests.
        let first = 16_000 + u16::try_from(getrandom::u64().unwrap() % 16_000).unwrap();
        let range = first..=first + 63;
        let mut config = config("a", Transport::Tcp);
        config.ucx.insert("TCP_PORT_RANGE".to_owned(), format!("{}-{}", range.start(), range.end()));
        let rpc = Rc::<RefCell<Client>>::default();
        // Opens it where other sockets have the ports in the first `fails` tries, while UCX wants one.
        let opened = |fails: usize| {
            let tries = Cell::new(0);
            let opened = open(&config, false, |context| {
                tries.set(tries.get() + 1);
                let held = range.clone().filter(|_| tries.get() <= fails);
                let _held: Vec<TcpListener> =
                    held.filter_map(|port| TcpListener::bind(("0.0.0.0", port)).ok()).collect();
                make_worker(&config, false, &rpc, context)
            });
            (opened, tries.get())
        };
        let (opened_at_last, tries) = opened(2);
        let (_context, worker, port) = opened_at_last.unwrap();
        assert!(tries >= 3 && !port.listeners.is_empty(), "after {tries} tries");
        drop(worker);
        let (refused, tries) = opened(usize::MAX);
        assert_eq!((refused.err().unwrap().kind(), tries), (ErrorKind::Ucx, TRIES + 1));
    }

    #[test]
    fn errors_that_no_port_explains_are_not_retried() {
        let tries = Cell::new(0);
        let refused = open(&config("a", Transport::Tcp), false, |_| {
            tries.set(tries.get() + 1);
            Err(Error::new(ErrorKind::Exhausted, "test"))
        });
        assert_eq!((refused.err().unwrap().message(), tries.get()), ("test", 1));
    }
}
