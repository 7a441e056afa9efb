//! The handshake client: DEALER sockets that never block, to be driven by the progress thread's loop.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::net::awaits::{Awaited, AwaitedPrefill, ListenerKey, PrefillWaits};
use crate::net::request::{ClientRequest, RequestPhase};
use crate::net::requests::{HandshakeAnswer, Requests};
use crate::net::resolver::Resolver;
use crate::net::route::{ListenerRoute, PROBE_AFTER, PROBE_SILENT_AFTER, RouteStep};
use crate::net::sealed::MAX_SEALED_REPLY;
use crate::net::{endpoint, host_port, unbracketed};
use crate::proto::ids::EngineId;
use crate::proto::wire::limits::MAX_REPLY_BYTES;
use crate::proto::wire::{HandshakeRequest, Message};
use crate::secret::Key;

/// Set in the ids of questions that the client asks by itself.
const OWN: u64 = 1 << 63;

/// Requests of one client to one listener that wait for an answer at a time; the others wait for their turn. Listeners of
/// protocol version 4 may lose the fourth of four replies at once.
pub(super) const PIPELINE: usize = 3;

/// The longest that an answer is waited for before it is asked for again.
const MAX_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Waiting times and bounds of a [`Client`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientLimits {
    /// First pause before asking a listener again that is not ready. It doubles up to `retry_max`.
    pub retry_min: Duration,
    /// Longest such pause.
    pub retry_max: Duration,
    /// How long addresses that refuse connections, and unresolved names, are tried again. Then that is the answer. A
    /// listener that restarts is back sooner.
    pub grace: Duration,
    /// The time after which a connection with an unanswered request is replaced. It doubles for that request.
    pub resend: Duration,
    /// A connection without requests is closed after so long.
    pub idle: Duration,
    /// Connections at a time.
    pub connections: usize,
}

impl Default for ClientLimits {
    fn default() -> Self {
        ClientLimits {
            retry_min: Duration::from_millis(20),
            retry_max: Duration::from_secs(1),
            grace: Duration::from_millis(500),
            resend: Duration::from_secs(5),
            // Long enough for the ranks of one engine to be asked one after the other, short enough that the
            // connections to listeners that have died do not pile up.
            idle: Duration::from_secs(5),
            connections: 256,
        }
    }
}

/// Asks listeners without blocking. Call [`Client::ask`], then [`Client::turn`] whenever a socket of
/// [`Client::poll_items`] is ready or [`Client::next_deadline`] has come, then [`Client::poll_answer`]. Every ask
/// gets exactly one answer, at its deadline at the latest. One socket per listener, shared by all requests to it.
///
/// With a key it sends nothing in clear, and takes nothing from an answer in clear but that it is a refusal.
pub struct Client {
    limits: ClientLimits,
    // Sockets go before the context, whose drop waits for them.
    connections: HashMap<(String, u16), Connection>,
    resolver: Resolver,
    context: Option<zmq::Context>,
    requests: Requests,
    awaits: PrefillWaits,
    /// Questions that were asked for `awaits`.
    asked: u64,
}

struct Connection {
    /// Once there is an address to connect to.
    socket: Option<zmq::Socket>,
    route: ListenerRoute,
    /// True if anything has come by this socket.
    heard: bool,
    idle_since: Option<Instant>,
}

impl Connection {
    fn new(now: Instant, key: &(String, u16)) -> Connection {
        Connection { socket: None, route: ListenerRoute::new(now, key.clone()), heard: false, idle_since: None }
    }
}

impl Client {
    /// A client without connections. It has no thread until the first [`Client::ask`]; from then on ZMQ's own. With a key,
    /// requests and replies are sealed with it.
    pub fn new(limits: ClientLimits, key: Option<Key>) -> Client {
        Client {
            requests: Requests::new(key, limits.retry_max),
            limits,
            connections: HashMap::new(),
            resolver: Resolver::default(),
            context: None,
            awaits: PrefillWaits::default(),
            asked: 0,
        }
    }

    /// Asks the listener at `host`:`port`. The request's id comes back in the answer: not 0, below 2^63, and not that of
    /// another question without an answer. Errors are answers too.
    pub fn ask(&mut self, now: Instant, host: &str, port: u16, request: HandshakeRequest, deadline: Instant) {
        let id = request.id();
        if id == 0 || self.requests.contains(id) {
            let e = Error::invalid(format!("handshake request id {id} is 0 or in use"));
            self.requests.answer(id, Err(e));
            return;
        }
        let key = (unbracketed(host).to_owned(), port);
        let ready = request.to_bytes().and_then(|clear| {
            self.connection(now, &key)?;
            let mut request = ClientRequest {
                key,
                clear,
                bytes: Vec::new(),
                exchange: None,
                asked: now,
                deadline,
                phase: RequestPhase::Unsent,
                sends: 0,
                answer_timeout: self.limits.resend,
                rest: self.limits.retry_min,
                refusal: None,
            };
            request.begin(self.requests.secret())?;
            Ok(request)
        });
        match ready {
            Ok(request) => self.requests.insert(id, request),
            Err(e) => self.requests.answer(id, Err(e)),
        }
    }

    /// Replaces the connection to the listener at `host`:`port`, and resolves the name again. Questions without an
    /// answer are asked again.
    pub fn reconnect(&mut self, now: Instant, host: &str, port: u16) {
        let key = (unbracketed(host).to_owned(), port);
        if self.connections.contains_key(&key) {
            self.connections.insert(key.clone(), Connection::new(now, &key));
            self.requests.ask_again(&key);
        }
    }

    /// Awaits a prefill of `engine`, whose listener is at `host`:`port`. [`Client::poll_prefill`] tells once when it
    /// is over or far enough, or that it can't be awaited, as when the listener gives no sign for `answer_timeout`.
    /// `number` comes back with it.
    #[allow(clippy::too_many_arguments)]
    pub fn await_prefill(
        &mut self,
        now: Instant,
        number: u64,
        host: &str,
        port: u16,
        engine: EngineId,
        prefill: AwaitedPrefill,
        answer_timeout: Duration,
    ) {
        let place = ListenerKey { host: unbracketed(host).to_owned(), port, engine };
        self.awaits.add(now, number, place, prefill, answer_timeout);
        self.ask_awaits(now);
    }

    /// No longer awaits a prefill.
    pub fn forget_prefill(&mut self, number: u64) {
        self.awaits.forget(number);
    }

    /// The next awaited prefill that is over or far enough, or cannot be awaited.
    pub fn poll_prefill(&mut self) -> Option<Awaited> {
        self.awaits.poll()
    }

    /// Asks for prefills what is to be asked.
    fn ask_awaits(&mut self, now: Instant) {
        while let Some((ListenerKey { host, port, engine }, prefills, deadline)) =
            self.awaits.ask(now, OWN | self.asked)
        {
            let id = OWN | self.asked;
            self.asked = self.asked.wrapping_add(1) & !OWN;
            let (requests, mut from_tokens): (Vec<_>, Vec<_>) =
                prefills.into_iter().map(|prefill| (prefill.request, prefill.from_tokens)).unzip();
            if from_tokens.iter().all(|from| *from == 0) {
                from_tokens.clear();
            }
            let request = HandshakeRequest::Await { id, engine, requests, from_tokens };
            self.ask(now, &host, port, request, deadline);
        }
    }

    /// Takes the answers to what was asked for prefills, and asks on.
    fn turn_awaits(&mut self, now: Instant) {
        for HandshakeAnswer { id, result } in self.requests.take_answers() {
            if let Some(result) = self.awaits.answered(now, id, result) {
                self.requests.answer(id, result);
            }
        }
        self.ask_awaits(now);
    }

    /// Sends and receives what can be without waiting, and lets deadlines pass.
    pub fn turn(&mut self, now: Instant) {
        if self.requests.is_empty() && self.connections.is_empty() {
            self.turn_awaits(now);
            return;
        }
        // After a pause of this process: an answer that came before its deadline counts, and a connection that has one is
        // not replaced.
        if self.requests.has_late(now) || self.stuck(now).next().is_some() {
            self.turn_connections(now);
        }
        self.expire(now);
        self.turn_routes(now);
        self.turn_connections(now);
        // Whether a request could be sent is known now.
        self.turn_routes(now);
        self.turn_awaits(now);
    }

    /// The next answer.
    pub fn poll_answer(&mut self) -> Option<HandshakeAnswer> {
        self.requests.poll_answer()
    }

    /// Adds the sockets to wait on, in the form that [`zmq::poll`] takes.
    pub fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        for (key, c) in &self.connections {
            c.route.poll_items(items);
            let Some(socket) = &c.socket else { continue };
            let unsent = self.requests.has_unsent(key) && self.requests.outstanding(key) < PIPELINE;
            items.push(socket.as_poll_item(if unsent { zmq::POLLIN | zmq::POLLOUT } else { zmq::POLLIN }));
        }
        items.extend(self.resolver.fd().map(|fd| zmq::PollItem::from_fd(fd, zmq::POLLIN)));
    }

    /// How long a request may wait before its addresses are probed.
    fn probe_after(&self, key: &(String, u16), heard: bool) -> Option<Duration> {
        // One that there is room for has not been sent because there is no connection, whatever was sent by an earlier one.
        if self.requests.has_unsent(key) && self.requests.outstanding(key) < PIPELINE {
            return Some(PROBE_AFTER);
        }
        (self.requests.has_sent(key) && !heard).then_some(PROBE_SILENT_AFTER)
    }

    /// When [`Client::turn`] must run even if no socket is ready.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.requests.has_answers() {
            return Some(Instant::now());
        }
        let connections = self.connections.iter().filter_map(|(key, c)| {
            let idle = c.idle_since.map(|since| since + self.limits.idle);
            [self.requests.renew_at(key), idle, c.route.due()].into_iter().flatten().min()
        });
        self.requests.deadlines().chain(connections).chain(self.awaits.due(Instant::now())).min()
    }

    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    fn connection(&mut self, now: Instant, key: &(String, u16)) -> Result<()> {
        if let Some(c) = self.connections.get_mut(key) {
            c.idle_since = None;
            c.route.wake(now);
            return Ok(());
        }
        endpoint(&key.0, key.1)?;
        if key.1 == 0 {
            return Err(Error::invalid(format!("port 0 of {} cannot be asked: expected 1 to 65535", key.0)));
        }
        if self.connections.len() >= self.limits.connections {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "{} handshake connections are open, which is the limit: {} was not asked",
                    self.connections.len(),
                    host_port(&key.0, key.1)
                ),
            ));
        }
        self.connections.insert(key.clone(), Connection::new(now, key));
        Ok(())
    }

    /// Finds routes to listeners that there is no connection to.
    fn turn_routes(&mut self, now: Instant) {
        let connections = &self.connections;
        for resolved in self.resolver.take(|name| connections.contains_key(name)) {
            if let Some(c) = self.connections.get_mut(&resolved.name) {
                c.route.resolved(resolved.result);
            }
        }
        let keys: Vec<_> = self.connections.keys().cloned().collect();
        for key in keys {
            let Some(heard) = self.connections.get(&key).map(|c| c.heard) else { continue };
            let (probe_after, grace) = (self.probe_after(&key, heard), self.limits.grace);
            let step = self.connections.get_mut(&key).and_then(|c| c.route.turn(now, probe_after, grace));
            let outcome = match step {
                None => Ok(()),
                Some(RouteStep::Resolve) => self.resolver.ask(&key),
                Some(RouteStep::Open(address)) => self.open(address).map(|socket| {
                    if let Some(c) = self.connections.get_mut(&key) {
                        (c.socket, c.heard) = (Some(socket), false);
                    }
                    // What was sent by another address is not answered any more.
                    self.requests.ask_again(&key);
                }),
                Some(RouteStep::Fail(e)) => Err(e),
            };
            if let Err(e) = outcome {
                self.connections.remove(&key);
                self.requests.fail_all(&key, &e);
            }
        }
    }

    fn open(&mut self, address: SocketAddr) -> Result<zmq::Socket> {
        let context = self.context.get_or_insert_with(zmq::Context::new);
        let refused = |e: zmq::Error| Error::new(ErrorKind::Io, format!("ZMQ refused a connection to {address}: {e}"));
        let socket = context.socket(zmq::DEALER).map_err(refused)?;
        let configure = || {
            socket.set_linger(0)?;
            socket.set_ipv6(address.is_ipv6())?;
            // Without a connection nothing is queued, so that it is known whether a request has left.
            socket.set_immediate(true)?;
            let limit = if self.requests.secret().is_some() { MAX_SEALED_REPLY } else { MAX_REPLY_BYTES };
            socket.set_maxmsgsize(i64::try_from(limit).unwrap_or(i64::MAX))?;
            socket.set_connect_timeout(3_000)?;
            socket.set_reconnect_ivl(50)?;
            socket.set_reconnect_ivl_max(1_000)?;
            // An address, so that ZMQ asks no name service on its thread, which all connections share.
            socket.connect(&format!("tcp://{address}"))
        };
        configure().map_err(refused)?;
        Ok(socket)
    }

    fn expire(&mut self, now: Instant) {
        let connections = &self.connections;
        self.requests.expire(now, |key| connections.get(key).map(|c| &c.route));
        for (key, c) in &mut self.connections {
            if !self.requests.has(key) {
                c.idle_since.get_or_insert(now);
            }
        }
        let idle = self.limits.idle;
        self.connections.retain(|_, c| c.idle_since.is_none_or(|since| since + idle > now));
        for key in self.stuck(now).cloned().collect::<Vec<_>>() {
            self.requests.wait_longer(now, &key, MAX_ANSWER_TIMEOUT);
            self.reconnect(now, &key.0, key.1);
        }
    }

    /// The connections with a request that gets no answer: the head may have died without closing its side (where that is
    /// known, ZMQ connects again by itself), its name may have got another address, or it lost the answer.
    fn stuck(&self, now: Instant) -> impl Iterator<Item = &(String, u16)> {
        self.connections.keys().filter(move |key| self.requests.renew_at(key).is_some_and(|at| at <= now))
    }

    fn turn_connections(&mut self, now: Instant) {
        let keys: Vec<_> = self.connections.keys().cloned().collect();
        for key in keys {
            self.turn_connection(now, &key);
        }
    }

    fn turn_connection(&mut self, now: Instant, key: &(String, u16)) {
        let outcome = loop {
            let Some(socket) = self.connections.get(key).and_then(|c| c.socket.as_ref()) else { return };
            let mut blocked = false;
            let room = PIPELINE.saturating_sub(self.requests.outstanding(key));
            let mut sent = 0;
            // One whose time is over is answered so, and not sent any more.
            for r in self.requests.unsent(key).filter(|r| r.deadline > now) {
                if sent == room {
                    break;
                }
                match socket.send(r.bytes.as_slice(), zmq::DONTWAIT) {
                    Ok(()) => {
                        r.phase = RequestPhase::Sent(now);
                        r.sends += 1;
                        sent += 1;
                    }
                    Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => {
                        blocked = true;
                        break;
                    }
                    Err(e) => {
                        let e = format!("ZMQ refused to send to {}: {e}", host_port(&key.0, key.1));
                        r.refusal = None;
                        log::warn!("kvferry client: {e}");
                        blocked = true;
                        break;
                    }
                }
            }
            let mut replies = Vec::new();
            let received = loop {
                match receive_last(socket) {
                    Ok(bytes) => replies.push(bytes),
                    Err(zmq::Error::EAGAIN) => break Ok(()),
                    Err(zmq::Error::EINTR) => {}
                    Err(e) => break Err(e),
                }
            };
            // Sending and receiving consume the socket's wake-up; asking for its events here leaves none unseen.
            let events = socket.get_events().unwrap_or(zmq::PollEvents::empty());
            let answered = !replies.is_empty();
            if answered && let Some(c) = self.connections.get_mut(key) {
                c.heard = true;
            }
            for bytes in replies {
                self.requests.judge(now, key, &bytes);
            }
            if let Err(e) = received {
                break Err(e);
            }
            let more = events.contains(zmq::POLLIN) || (blocked && events.contains(zmq::POLLOUT));
            if !more && !answered {
                break Ok(());
            }
        };
        if let Err(e) = outcome {
            self.connections.remove(key);
            let text = format!("the connection to {} failed: {e}", host_port(&key.0, key.1));
            self.requests.fail_all(key, &Error::new(ErrorKind::Io, text));
        }
    }
}

/// The last frame of one message, without waiting. Replies have one; an empty delimiter before it is let pass.
fn receive_last(socket: &zmq::Socket) -> zmq::Result<zmq::Message> {
    loop {
        let frame = socket.recv_msg(zmq::DONTWAIT)?;
        if !frame.get_more() {
            return Ok(frame);
        }
    }
}
