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

/// The knowledge of how to reach the listener at a host and port.
#[derive(Debug)]
pub(super) struct ListenerRoute {
    name: (String, u16),
    is_address: bool,
    since: Instant,
    addresses: ResolvedAddresses,
    /// The address that was handed out.
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
enum ResolvedAddresses {
    /// The name service has not been asked.
    Unknown,
    Asked,
    /// It knows none.
    Failed(String),
    Known(Vec<SocketAddr>),
}

/// The next step of a route.
#[derive(Debug)]
pub(super) enum RouteStep {
    /// Resolve the name, then tell [`ListenerRoute::resolved`].
    Resolve,
    /// Connect to this address.
    Open(SocketAddr),
    /// Nobody gets there.
    Fail(Error),
}

impl ListenerRoute {
    /// The route to the listener at a host and port; its first step comes from [`ListenerRoute::turn`].
    pub(super) fn new(now: Instant, name: (String, u16)) -> ListenerRoute {
        let address = name.0.parse::<IpAddr>().ok().map(|ip| vec![SocketAddr::new(ip, name.1)]);
        let is_address = address.is_some();
        let addresses = address.map_or(ResolvedAddresses::Unknown, ResolvedAddresses::Known);
        ListenerRoute {
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

    /// Takes the answer of the name service.
    pub(super) fn resolved(&mut self, result: Result<Vec<SocketAddr>, String>) {
        self.addresses = match result {
            Ok(addresses) => ResolvedAddresses::Known(addresses),
            Err(e) => ResolvedAddresses::Failed(e),
        };
        self.not_before = self.since;
    }

    /// Takes the next step. `probe_after`: how long a request that waits may do so before the addresses are probed, if one
    /// does. `grace`: how long addresses that refuse and names that do not resolve are tried again.
    pub(super) fn turn(&mut self, now: Instant, probe_after: Option<Duration>, grace: Duration) -> Option<RouteStep> {
        let Some(probe_after) = probe_after else {
            (self.probes, self.waiting, self.failing) = (Vec::new(), None, None);
            return None;
        };
        self.waiting = Some((self.waiting.map_or(now, |(since, _)| since), probe_after));
        let is_due = self.attempt_at().is_some_and(|at| at <= now);
        let addresses = match &self.addresses {
            ResolvedAddresses::Asked => return None,
            ResolvedAddresses::Unknown if !is_due => return None,
            ResolvedAddresses::Unknown => {
                self.addresses = ResolvedAddresses::Asked;
                return Some(RouteStep::Resolve);
            }
            ResolvedAddresses::Failed(e) => {
                let text = format!(
                    "the host name {:?} does not resolve here ({e}); remote_host in kv_transfer_params has to be an \
                     address of the producer's head node, or a name that this host knows",
                    self.name.0
                );
                return self.failed(now, text, grace);
            }
            // One alone needs no choice.
            ResolvedAddresses::Known(all) if all.len() == 1 && self.chosen.is_none() => {
                return self.choose(all.first().copied());
            }
            ResolvedAddresses::Known(all) => all,
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
        if wrong { Some(RouteStep::Fail(Error::corrupt(text))) } else { self.failed(now, text, grace) }
    }

    /// Nothing of it can be reached: the end after the grace, else all of it again later.
    fn failed(&mut self, now: Instant, text: String, grace: Duration) -> Option<RouteStep> {
        let since = self.failing.as_ref().map_or(now, |(since, _)| *since);
        self.probes.clear();
        self.not_before = now + AGAIN;
        if !self.is_address {
            // It may have got another address.
            (self.addresses, self.chosen) = (ResolvedAddresses::Unknown, None);
        }
        if now.saturating_duration_since(since) >= grace {
            return Some(RouteStep::Fail(Error::new(ErrorKind::Unreachable, text)));
        }
        self.failing = Some((since, text));
        None
    }

    fn choose(&mut self, address: Option<SocketAddr>) -> Option<RouteStep> {
        (self.chosen, self.probes) = (address, Vec::new());
        address.map(RouteStep::Open)
    }

    /// When to try to reach the listener, while a request waits.
    fn attempt_at(&self) -> Option<Instant> {
        let (since, probe_after) = self.waiting?;
        Some(if self.chosen.is_some() { self.not_before.max(since + probe_after) } else { self.not_before })
    }

    /// When to take the next step although nothing has come, while a request waits.
    pub(super) fn due(&self) -> Option<Instant> {
        match &self.addresses {
            ResolvedAddresses::Asked => None,
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

    /// Describes a listener to which there has been no connection until now.
    pub(super) fn describe(&self, now: Instant) -> String {
        let waited = now.saturating_duration_since(self.since).as_millis();
        if let Some((_, text)) = &self.failing {
            return text.clone();
        }
        if matches!(self.addresses, ResolvedAddresses::Asked) {
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
        let each: Vec<String> = self.probes.iter().map(|probe| self.describe_probe(probe)).collect();
        format!("{}; {REMEDY}", each.join(", and "))
    }

    fn describe_probe(&self, probe: &Probe) -> String {
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

    fn next(route: &mut ListenerRoute) -> RouteStep {
        let begin = Instant::now();
        loop {
            let now = Instant::now();
            assert!(now - begin < LONG, "{route:?}");
            if let Some(step) = route.turn(now, Some(Duration::ZERO), LONG) {
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
    fn route_to_a_listener_that_is_gone(context: &zmq::Context) -> (ListenerRoute, SocketAddr, SocketAddr) {
        let (listener, first) = router(context, SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), 0))).unwrap();
        let second = SocketAddr::from((Ipv4Addr::LOCALHOST, first.port()));
        let mut route = ListenerRoute::new(Instant::now(), ("head.example".to_owned(), first.port()));
        assert!(matches!(next(&mut route), RouteStep::Resolve));
        route.resolved(Ok(vec![second, first]));
        assert!(matches!(next(&mut route), RouteStep::Open(at) if at == first));
        drop(listener);
        (route, first, second)
    }

    #[test]
    fn a_dead_address_of_a_name_is_left_for_one_that_fits() {
        let context = zmq::Context::new();
        // The port is free at the first address; at the second one it may be in use.
        let (mut route, second, _new) = loop {
            let (route, _, second) = route_to_a_listener_that_is_gone(&context);
            if let Some(new) = router(&context, second) {
                break (route, second, new);
            }
        };
        assert!(matches!(next(&mut route), RouteStep::Open(at) if at == second), "{route:?}");
        // It stays there as long as it is right.
        route.wake(Instant::now());
        for _ in 0..100 {
            assert!(route.turn(Instant::now(), Some(Duration::ZERO), LONG).is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_address_that_says_nothing_is_left_for_one_that_fits() {
        let context = zmq::Context::new();
        let begin = Instant::now();
        // The old listener goes in its own time, and somebody else may have the port at the second address.
        let (mut route, second, _silent, _new) = loop {
            let (route, first, second) = route_to_a_listener_that_is_gone(&context);
            let silent = loop {
                match std::net::TcpListener::bind(first) {
                    Ok(listener) => break listener,
                    Err(e) => assert!(begin.elapsed() < LONG, "{e}"),
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            if let Some((new, _)) = router(&context, second) {
                break (route, second, silent, new);
            }
        };
        assert!(matches!(next(&mut route), RouteStep::Open(at) if at == second), "{route:?}");
    }
}
