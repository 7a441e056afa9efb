//! The way to a listener: which of the addresses of its host to connect to, and what is in the way if there is none.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::host_port;
use super::probe::{Finding, Probe};
use crate::error::{Error, ErrorKind};

/// Once a request has waited so long for a connection, the addresses are probed.
pub(super) const PROBE_AFTER: Duration = Duration::from_millis(100);
/// How long the address in use gets to show that it leads to a listener, when another one does.
const SETTLE: Duration = Duration::from_millis(500);
/// Until addresses of which the one in use is right are probed again, because requests still wait.
const AGAIN_RIGHT: Duration = Duration::from_secs(5);
/// Until addresses that refused are probed again.
const AGAIN: Duration = Duration::from_millis(200);

/// The same where a request was sent, and nothing was ever heard. A listener that is only busy is left alone for longer.
pub(super) const PROBE_SILENT_AFTER: Duration = Duration::from_secs(1);

const REMEDY: &str = "check that the producer engine runs, that this is the host and port of its head node (remote_host and \
                      remote_port in kv_transfer_params), and that no firewall is between";

/// What is known about how to reach the listener at a host and port.
#[derive(Debug)]
pub(super) struct Way {
    name: (String, u16),
    is_address: bool,
    since: Instant,
    addresses: Addresses,
    /// Whether one of them was handed out.
    chosen: Option<SocketAddr>,
    probes: Vec<Probe>,
    /// When those were started.
    probed: Instant,
    /// Since when a request waits, and how long one may before the addresses are probed.
    waiting: Option<(Instant, Duration)>,
    /// No new attempt sooner.
    not_before: Instant,
    /// Since when every attempt has failed, and how the last one did.
    failing: Option<(Instant, String)>,
}

#[derive(Debug)]
enum Addresses {
    /// The name service has not been asked.
    Unknown,
    Asked,
    /// It knows none.
    Failed(String),
    Known(Vec<SocketAddr>),
}

/// What to do about a way.
#[derive(Debug)]
pub(super) enum Step {
    /// Resolve the name, then tell [`Way::resolved`].
    Resolve,
    /// Connect to this address.
    Open(SocketAddr),
    /// Nobody gets there.
    Fail(Error),
}

impl Way {
    /// The way to the listener at a host and port; looked at first by [`Way::turn`].
    pub(super) fn new(now: Instant, name: (String, u16)) -> Way {
        let address = name.0.parse::<IpAddr>().ok().map(|ip| vec![SocketAddr::new(ip, name.1)]);
        let is_address = address.is_some();
        let addresses = address.map_or(Addresses::Unknown, Addresses::Known);
        Way {
            name,
            is_address,
            since: now,
            addresses,
            chosen: None,
            probes: Vec::new(),
            probed: now,
            waiting: Some((now, PROBE_AFTER)),
            not_before: now,
            failing: None,
        }
    }

    /// A request has come: the next step is due, if only to see whether one is needed.
    pub(super) fn wake(&mut self, now: Instant) {
        self.waiting.get_or_insert((now, PROBE_AFTER));
    }

    /// What the name service said.
    pub(super) fn resolved(&mut self, result: Result<Vec<SocketAddr>, String>) {
        self.addresses = match result {
            Ok(addresses) => Addresses::Known(addresses),
            Err(e) => Addresses::Failed(e),
        };
        self.not_before = self.since;
    }

    /// Takes the next step. `patience`: how long a request that waits may do so before the addresses are probed, if one
    /// does. `grace`: how long addresses that refuse and names that do not resolve are tried again.
    pub(super) fn turn(&mut self, now: Instant, patience: Option<Duration>, grace: Duration) -> Option<Step> {
        let Some(patience) = patience else {
            (self.probes, self.waiting, self.failing) = (Vec::new(), None, None);
            return None;
        };
        self.waiting = Some((self.waiting.map_or(now, |(since, _)| since), patience));
        let is_due = self.attempt_at().is_some_and(|at| at <= now);
        let addresses = match &self.addresses {
            Addresses::Asked => return None,
            Addresses::Unknown if !is_due => return None,
            Addresses::Unknown => {
                self.addresses = Addresses::Asked;
                return Some(Step::Resolve);
            }
            Addresses::Failed(e) => {
                let text = format!(
                    "the host name {:?} does not resolve here ({e}); remote_host in kv_transfer_params has to be an \
                     address of the producer's head node, or a name that this host knows",
                    self.name.0
                );
                return self.failed(now, text, grace);
            }
            // One alone needs no choice.
            Addresses::Known(all) if all.len() == 1 && self.chosen.is_none() => {
                return self.choose(all.first().copied());
            }
            Addresses::Known(all) => all,
        };
        if self.probes.is_empty() {
            if !is_due {
                return None;
            }
            (self.probes, self.probed) = (addresses.iter().map(|to| Probe::start(*to)).collect(), now);
        }
        self.probes.iter_mut().for_each(|probe| probe.turn(now));
        // The connection that there is stays as long as its address leads anywhere.
        let chosen = self.probes.iter().find(|probe| Some(probe.to()) == self.chosen).map(Probe::finding);
        match chosen {
            Some(Finding::Fits) => {
                (self.probes, self.failing, self.not_before) = (Vec::new(), None, now + AGAIN_RIGHT);
                return None;
            }
            Some(finding) if finding.is_open() && now < self.probed + SETTLE => return None,
            _ => {}
        }
        if let Some(found) = self.probes.iter().find(|probe| *probe.finding() == Finding::Fits) {
            return self.choose(Some(found.to()));
        }
        if self.probes.iter().any(|probe| probe.finding().is_open()) {
            return None;
        }
        let wrong = self.probes.iter().all(|probe| matches!(probe.finding(), Finding::Foreign(_)));
        let text = self.seen();
        if wrong { Some(Step::Fail(Error::corrupt(text))) } else { self.failed(now, text, grace) }
    }

    /// Nothing of it can be reached: the end after the grace, else all of it again later.
    fn failed(&mut self, now: Instant, text: String, grace: Duration) -> Option<Step> {
        let since = self.failing.as_ref().map_or(now, |(since, _)| *since);
        self.probes.clear();
        self.not_before = now + AGAIN;
        if !self.is_address {
            // It may have got another address.
            (self.addresses, self.chosen) = (Addresses::Unknown, None);
        }
        if now.saturating_duration_since(since) >= grace {
            return Some(Step::Fail(Error::new(ErrorKind::Unreachable, text)));
        }
        self.failing = Some((since, text));
        None
    }

    fn choose(&mut self, address: Option<SocketAddr>) -> Option<Step> {
        (self.chosen, self.probes) = (address, Vec::new());
        address.map(Step::Open)
    }

    /// When to look for a way, while a request waits.
    fn attempt_at(&self) -> Option<Instant> {
        let (since, patience) = self.waiting?;
        Some(if self.chosen.is_some() { self.not_before.max(since + patience) } else { self.not_before })
    }

    /// When to take the next step although nothing has come, while a request waits.
    pub(super) fn due(&self) -> Option<Instant> {
        match &self.addresses {
            Addresses::Asked => None,
            _ if self.probes.is_empty() => self.attempt_at(),
            _ => {
                let fits = self.probes.iter().any(|probe| *probe.finding() == Finding::Fits);
                let settled = fits.then_some(self.probed + SETTLE);
                self.probes.iter().filter_map(Probe::due).chain(settled).min()
            }
        }
    }

    /// To wait on, in the form that [`zmq::poll`] takes.
    pub(super) fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        items.extend(self.probes.iter().filter_map(Probe::poll_item));
    }

    /// What was seen of a listener to which there has been no connection until now.
    pub(super) fn describe(&self, now: Instant) -> String {
        let waited = now.saturating_duration_since(self.since).as_millis();
        if let Some((_, text)) = &self.failing {
            return text.clone();
        }
        if matches!(self.addresses, Addresses::Asked) {
            return format!(
                "the name service has not told the address of {:?} within {waited} ms; check this host's DNS, or give an \
                 address as remote_host",
                self.name.0
            );
        }
        if self.probes.is_empty() {
            let at = host_port(&self.name.0, self.name.1);
            return format!("no connection to the handshake listener at {at} within {waited} ms; {REMEDY}");
        }
        format!("no connection within {waited} ms: {}", self.seen())
    }

    fn seen(&self) -> String {
        let each: Vec<String> = self.probes.iter().map(|probe| self.told(probe)).collect();
        format!("{}; {REMEDY}", each.join(", and "))
    }

    fn told(&self, probe: &Probe) -> String {
        let at = probe.to();
        let at = if self.is_address { at.to_string() } else { format!("{at} ({})", self.name.0) };
        match probe.finding() {
            Finding::Nothing => format!("{at} does not answer: its host is down or drops the packets"),
            Finding::Refused(why) => format!("{at} {why}"),
            Finding::Silent => format!(
                "what listens on {at} accepts connections and says nothing: it is no kvferry listener, or its process is \
                 stopped"
            ),
            Finding::Closed => format!("what listens on {at} closes each connection without a word"),
            Finding::Foreign(what) => format!("what listens on {at} is no kvferry listener but {what}"),
            Finding::Fits => format!("a ZMQ socket listens on {at}, to which there is no connection yet"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn next(way: &mut Way) -> Step {
        let begin = Instant::now();
        loop {
            let now = Instant::now();
            assert!(now - begin < LONG, "{way:?}");
            if let Some(step) = way.turn(now, Some(Duration::ZERO), LONG) {
                return step;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A listener, as far as a probe can see; none where somebody else has the port.
    fn router(context: &zmq::Context, at: SocketAddr) -> Option<(zmq::Socket, SocketAddr)> {
        let socket = context.socket(zmq::ROUTER).unwrap();
        let port = if at.port() == 0 { "*".to_owned() } else { at.port().to_string() };
        match socket.bind(&format!("tcp://{}:{port}", at.ip())) {
            Err(zmq::Error::EADDRINUSE) => return None,
            bound => bound.unwrap(),
        }
        let bound = socket.get_last_endpoint().unwrap().unwrap();
        Some((socket, bound.trim_start_matches("tcp://").parse().unwrap()))
    }

    /// A way by a name of two addresses, of which the first is in use; its listener is gone.
    fn way_to_a_listener_that_is_gone(context: &zmq::Context) -> (Way, SocketAddr, SocketAddr) {
        let (listener, first) = router(context, SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), 0))).unwrap();
        let second = SocketAddr::from((Ipv4Addr::LOCALHOST, first.port()));
        let mut way = Way::new(Instant::now(), ("head.example".to_owned(), first.port()));
        assert!(matches!(next(&mut way), Step::Resolve));
        way.resolved(Ok(vec![second, first]));
        assert!(matches!(next(&mut way), Step::Open(at) if at == first));
        drop(listener);
        (way, first, second)
    }

    #[test]
    fn a_dead_address_of_a_name_is_left_for_one_that_fits() {
        let context = zmq::Context::new();
        // The port is free at the first address; at the second one it may be in use.
        let (mut way, second, _new) = loop {
            let (way, _, second) = way_to_a_listener_that_is_gone(&context);
            if let Some(new) = router(&context, second) {
                break (way, second, new);
            }
        };
        assert!(matches!(next(&mut way), Step::Open(at) if at == second), "{way:?}");
        // It stays there as long as it is right.
        way.wake(Instant::now());
        for _ in 0..100 {
            assert!(way.turn(Instant::now(), Some(Duration::ZERO), LONG).is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_address_that_says_nothing_is_left_for_one_that_fits() {
        let context = zmq::Context::new();
        let begin = Instant::now();
        // The old listener goes in its own time, and somebody else may have the port at the second address.
        let (mut way, second, _silent, _new) = loop {
            let (way, first, second) = way_to_a_listener_that_is_gone(&context);
            let silent = loop {
                match std::net::TcpListener::bind(first) {
                    Ok(listener) => break listener,
                    Err(e) => assert!(begin.elapsed() < LONG, "{e}"),
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            if let Some((new, _)) = router(&context, second) {
                break (way, second, silent, new);
            }
        };
        assert!(matches!(next(&mut way), Step::Open(at) if at == second), "{way:?}");
    }
}
