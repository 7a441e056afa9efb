//! The handshake client: DEALER sockets that never block, to be driven by the ferry thread's loop.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use serde_bytes::ByteBuf;

use crate::error::{Error, ErrorKind, Result};
use crate::net::awaits::{Awaited, Awaits, Place};
use crate::net::sealed::{self, Exchange, Kind, MAX_SEALED_REPLY};
use crate::net::{endpoint, host_port, is_ipv6, unbracketed};
use crate::proto::ids::{EngineId, RankId, RequestId};
use crate::proto::wire::limits::MAX_REPLY_BYTES;
use crate::proto::wire::{HandshakeReply, HandshakeRequest, Message, RefusalCode};
use crate::secret::Key;

/// Set in the ids of questions that the client asks by itself.
const OWN: u64 = 1 << 63;

/// Requests of one client to one listener that wait for an answer at a time; the others wait for their turn. A listener
/// holds so many replies for a client that does not read them, and drops more.
pub(super) const PIPELINE: usize = 4;

/// What to ask a listener.
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    /// The metadata of `ranks` (all if empty) of `engine` (any if None).
    Query {
        /// The engine expected there.
        engine: Option<EngineId>,
        /// The ranks wanted.
        ranks: Vec<RankId>,
    },
    /// To tell when one of these prefills of `engine` is over.
    Await {
        /// The engine expected there.
        engine: EngineId,
        /// The prefills, by their `transfer_id`.
        requests: Vec<RequestId>,
    },
    /// To take one rank's metadata.
    Push {
        /// Ranks of the engine in all.
        expected: u32,
        /// The encoded `RankMetadata`.
        metadata: Vec<u8>,
    },
}

/// What came of an [`Ask`].
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The id that the question was asked under.
    pub id: u64,
    /// The listener's reply (a refusal included), or why there was none in time.
    pub result: Result<HandshakeReply>,
}

/// Waiting times and bounds of a [`Client`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientLimits {
    /// First pause before asking again a listener that is not ready; it doubles up to `retry_max`.
    pub retry_min: Duration,
    /// Longest such pause.
    pub retry_max: Duration,
    /// A connection on which a sent request stays unanswered for so long is replaced by a new one (doubling).
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
            resend: Duration::from_secs(5),
            // Long enough for the ranks of one engine to be asked one after the other, short enough that the
            // connections to listeners that have died do not pile up.
            idle: Duration::from_secs(5),
            connections: 256,
        }
    }
}

/// Asks listeners without blocking: [`Client::ask`], then [`Client::turn`] whenever a socket of [`Client::poll_items`]
/// is ready or [`Client::next_deadline`] has come, then [`Client::poll_answer`]. Every ask gets exactly one answer, at its
/// deadline at the latest. One socket per listener, shared by all requests to it.
///
/// With a key it sends nothing in clear, and takes nothing from an answer in clear but that it is a refusal.
pub struct Client {
    limits: ClientLimits,
    key: Option<Key>,
    // Sockets go before the context, whose drop waits for them.
    connections: HashMap<(String, u16), Connection>,
    context: Option<zmq::Context>,
    requests: BTreeMap<u64, Request>,
    answers: VecDeque<Answer>,
    awaits: Awaits,
    /// Questions that were asked for `awaits`.
    asked: u64,
}

struct Connection {
    socket: zmq::Socket,
    idle_since: Option<Instant>,
    /// When to replace the socket, and the pause that led there.
    renew_at: Option<Instant>,
    pause: Duration,
    /// For a host name: whether this socket tries its IPv6 addresses.
    ipv6: bool,
}

enum Phase {
    Unsent,
    Sent(Instant),
    /// Refused as not ready; to be sent again then.
    Resting(Instant),
}

struct Request {
    key: (String, u16),
    /// The encoded request.
    clear: Vec<u8>,
    /// What is sent next; the request itself without a key.
    bytes: Vec<u8>,
    /// With a key: the exchange's number and how far it is.
    exchange: Option<(u64, Exchange)>,
    asked: Instant,
    deadline: Instant,
    phase: Phase,
    sends: u32,
    rest: Duration,
    /// The last "not ready", given as the answer if the deadline comes first.
    refusal: Option<HandshakeReply>,
}

impl Client {
    /// A client without connections. It has no thread until the first [`Client::ask`]; from then on ZMQ's own.
    pub fn new(limits: ClientLimits) -> Client {
        Client::with_key(limits, None)
    }

    /// As [`Client::new`]; with a key, requests and replies are sealed with it.
    pub fn with_key(limits: ClientLimits, key: Option<Key>) -> Client {
        Client {
            limits,
            key,
            connections: HashMap::new(),
            context: None,
            requests: BTreeMap::new(),
            answers: VecDeque::new(),
            awaits: Awaits::default(),
            asked: 0,
        }
    }

    /// Asks the listener at `host`:`port`. `id` is the request's id on the wire and comes back in the answer: not 0, below
    /// 2^63, and not that of another question without an answer. Errors are answers too.
    pub fn ask(&mut self, now: Instant, id: u64, host: &str, port: u16, ask: Ask, deadline: Instant) {
        if id == 0 || self.requests.contains_key(&id) {
            let e = Error::invalid(format!("handshake request id {id} is 0 or in use"));
            self.answers.push_back(Answer { id, result: Err(e) });
            return;
        }
        let request = match ask {
            Ask::Query { engine, ranks } => HandshakeRequest::Query { id, engine, ranks },
            Ask::Await { engine, requests } => HandshakeRequest::Await { id, engine, requests },
            Ask::Push { expected, metadata } => {
                HandshakeRequest::Push { id, expected, metadata: ByteBuf::from(metadata) }
            }
        };
        let key = (unbracketed(host).to_owned(), port);
        let ready = request.to_bytes().and_then(|clear| {
            self.connection(now, &key)?;
            let mut request = Request {
                key,
                clear,
                bytes: Vec::new(),
                exchange: None,
                asked: now,
                deadline,
                phase: Phase::Unsent,
                sends: 0,
                rest: self.limits.retry_min,
                refusal: None,
            };
            request.begin(self.key.as_ref())?;
            Ok(request)
        });
        match ready {
            Ok(request) => {
                self.requests.insert(id, request);
            }
            Err(e) => self.answers.push_back(Answer { id, result: Err(e) }),
        }
    }

    /// Awaits a prefill of `engine`, whose listener is at `host`:`port`, by its `transfer_id`: [`Client::poll_prefill`] tells
    /// when it is over, or that it can't be awaited, as when the listener gives no sign for `patience`. `number` comes back
    /// with it.
    #[allow(clippy::too_many_arguments)]
    pub fn await_prefill(
        &mut self,
        now: Instant,
        number: u64,
        host: &str,
        port: u16,
        engine: EngineId,
        request: RequestId,
        patience: Duration,
    ) {
        let place = Place { host: unbracketed(host).to_owned(), port, engine };
        self.awaits.add(now, number, place, request, patience);
        self.ask_awaits(now);
    }

    /// No longer awaits a prefill.
    pub fn forget_prefill(&mut self, number: u64) {
        self.awaits.forget(number);
    }

    /// The next prefill that was awaited and is over, or cannot be awaited.
    pub fn poll_prefill(&mut self) -> Option<Awaited> {
        self.awaits.poll()
    }

    /// Asks for prefills what is to be asked.
    fn ask_awaits(&mut self, now: Instant) {
        while let Some((Place { host, port, engine }, requests, deadline)) = self.awaits.ask(now, OWN | self.asked) {
            let id = OWN | self.asked;
            self.asked = self.asked.wrapping_add(1) & !OWN;
            self.ask(now, id, &host, port, Ask::Await { engine, requests }, deadline);
        }
    }

    /// Takes the answers to what was asked for prefills, and asks on.
    fn turn_awaits(&mut self, now: Instant) {
        for Answer { id, result } in std::mem::take(&mut self.answers) {
            if let Some(result) = self.awaits.answered(now, id, result) {
                self.answers.push_back(Answer { id, result });
            }
        }
        self.ask_awaits(now);
    }

    /// Drops a question; it gets no answer.
    pub fn forget(&mut self, id: u64) {
        self.requests.remove(&id);
        self.answers.retain(|a| a.id != id);
    }

    /// Sends and receives what can be without waiting, and lets deadlines pass.
    pub fn turn(&mut self, now: Instant) {
        if self.requests.is_empty() && self.connections.is_empty() {
            self.turn_awaits(now);
            return;
        }
        self.expire(now);
        let keys: Vec<_> = self.connections.keys().cloned().collect();
        for key in keys {
            self.turn_connection(now, &key);
        }
        self.turn_awaits(now);
    }

    /// The next answer.
    pub fn poll_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// Adds the sockets to wait on, in the form that [`zmq::poll`] takes.
    pub fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        for (key, c) in &self.connections {
            let unsent = self.requests.values().any(|r| matches!(r.phase, Phase::Unsent) && r.key == *key)
                && self.outstanding(key) < PIPELINE;
            items.push(c.socket.as_poll_item(if unsent { zmq::POLLIN | zmq::POLLOUT } else { zmq::POLLIN }));
        }
    }

    /// Requests that were sent to a listener and are not answered.
    fn outstanding(&self, key: &(String, u16)) -> usize {
        self.requests.values().filter(|r| r.key == *key && matches!(r.phase, Phase::Sent(_))).count()
    }

    /// When [`Client::turn`] must run even if no socket is ready.
    pub fn next_deadline(&self) -> Option<Instant> {
        if !self.answers.is_empty() {
            return Some(Instant::now());
        }
        let requests = self.requests.values().map(|r| match r.phase {
            Phase::Resting(until) => until.min(r.deadline),
            _ => r.deadline,
        });
        let connections = self.connections.values().filter_map(|c| match (c.renew_at, c.idle_since) {
            (Some(at), _) => Some(at),
            (None, Some(since)) => Some(since + self.limits.idle),
            (None, None) => None,
        });
        requests.chain(connections).chain(self.awaits.due(Instant::now())).min()
    }

    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    fn connection(&mut self, now: Instant, key: &(String, u16)) -> Result<()> {
        if let Some(c) = self.connections.get_mut(key) {
            c.idle_since = None;
            c.renew_at.get_or_insert(now + c.pause);
            return Ok(());
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
        let ipv6 = is_ipv6(&key.0);
        let socket = self.open(key, ipv6)?;
        let pause = self.limits.resend;
        let connection = Connection { socket, idle_since: None, renew_at: Some(now + pause), pause, ipv6 };
        self.connections.insert(key.clone(), connection);
        Ok(())
    }

    fn open(&mut self, key: &(String, u16), ipv6: bool) -> Result<zmq::Socket> {
        let to = endpoint(&key.0, key.1)?;
        if key.1 == 0 {
            return Err(Error::invalid(format!("port 0 of {} cannot be asked: expected 1 to 65535", key.0)));
        }
        let context = self.context.get_or_insert_with(zmq::Context::new);
        let refused = |e: zmq::Error| Error::new(ErrorKind::Io, format!("ZMQ refused a connection to {to}: {e}"));
        let socket = context.socket(zmq::DEALER).map_err(refused)?;
        let configure = || {
            socket.set_linger(0)?;
            socket.set_ipv6(ipv6)?;
            // Without a connection nothing is queued, so that it is known whether a request has left.
            socket.set_immediate(true)?;
            let limit = if self.key.is_some() { MAX_SEALED_REPLY } else { MAX_REPLY_BYTES };
            socket.set_maxmsgsize(i64::try_from(limit).unwrap_or(i64::MAX))?;
            socket.set_connect_timeout(3_000)?;
            socket.set_reconnect_ivl(50)?;
            socket.set_reconnect_ivl_max(1_000)?;
            socket.connect(&to)
        };
        configure().map_err(refused)?;
        Ok(socket)
    }

    fn expire(&mut self, now: Instant) {
        let mut failed = Vec::new();
        for (id, r) in &mut self.requests {
            if let Phase::Resting(until) = r.phase
                && until <= now
                && let Err(e) = r.begin(self.key.as_ref())
            {
                failed.push((*id, e));
            }
        }
        failed.into_iter().for_each(|(id, e)| self.end(id, Err(e)));
        let late: Vec<u64> = self.requests.iter().filter(|(_, r)| r.deadline <= now).map(|(id, _)| *id).collect();
        for id in late {
            let Some(r) = self.requests.remove(&id) else { continue };
            let result = r.refusal.clone().map_or_else(|| Err(no_answer(&r, now)), Ok);
            self.answers.push_back(Answer { id, result });
        }
        for (key, c) in &mut self.connections {
            if !self.requests.values().any(|r| r.key == *key) {
                c.renew_at = None;
                c.idle_since.get_or_insert(now);
            } else if !self.requests.values().any(|r| r.key == *key && !matches!(r.phase, Phase::Resting(_))) {
                c.renew_at = None;
            } else {
                c.renew_at.get_or_insert(now + c.pause);
            }
        }
        let idle = self.limits.idle;
        self.connections.retain(|_, c| c.idle_since.is_none_or(|since| since + idle > now));
        let stuck: Vec<_> = self
            .connections
            .iter()
            .filter(|(_, c)| c.renew_at.is_some_and(|at| at <= now))
            .map(|(k, _)| k.clone())
            .collect();
        for key in stuck {
            self.renew(now, &key);
        }
    }

    /// Replaces a socket whose requests get no answer: the head may have died without closing its side, or a host name
    /// may have to be tried in the other address family.
    fn renew(&mut self, now: Instant, key: &(String, u16)) {
        let Some(old) = self.connections.remove(key) else { return };
        let named = !is_ipv6(&key.0) && key.0.parse::<Ipv4Addr>().is_err();
        let ipv6 = old.ipv6 != named;
        let pause = (old.pause * 2).min(Duration::from_secs(60));
        drop(old);
        match self.open(key, ipv6) {
            Ok(socket) => {
                let connection = Connection { socket, idle_since: None, renew_at: Some(now + pause), pause, ipv6 };
                self.connections.insert(key.clone(), connection);
                let mut failed = Vec::new();
                for (id, r) in self.requests.iter_mut().filter(|(_, r)| r.key == *key) {
                    if !matches!(r.phase, Phase::Resting(_))
                        && let Err(e) = r.begin(self.key.as_ref())
                    {
                        failed.push((*id, e));
                    }
                }
                failed.into_iter().for_each(|(id, e)| self.end(id, Err(e)));
            }
            Err(e) => self.fail_all(key, &e),
        }
    }

    fn fail_all(&mut self, key: &(String, u16), error: &Error) {
        let lost: Vec<u64> = self.requests.iter().filter(|(_, r)| r.key == *key).map(|(id, _)| *id).collect();
        lost.into_iter().for_each(|id| self.end(id, Err(error.clone())));
    }

    /// The request is over.
    fn end(&mut self, id: u64, result: Result<HandshakeReply>) {
        if self.requests.remove(&id).is_some() {
            self.answers.push_back(Answer { id, result });
        }
    }

    fn turn_connection(&mut self, now: Instant, key: &(String, u16)) {
        let outcome = loop {
            let Some(connection) = self.connections.get(key) else { return };
            let socket = &connection.socket;
            let mut blocked = false;
            let room = PIPELINE.saturating_sub(self.outstanding(key));
            let mut sent = 0;
            for r in self.requests.values_mut().filter(|r| r.key == *key && matches!(r.phase, Phase::Unsent)) {
                if sent == room {
                    break;
                }
                match socket.send(r.bytes.as_slice(), zmq::DONTWAIT) {
                    Ok(()) => {
                        r.phase = Phase::Sent(now);
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
            for bytes in replies {
                self.judge(now, key, &bytes);
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
            self.fail_all(key, &Error::new(ErrorKind::Io, text));
        }
    }

    /// Takes a frame that arrived.
    fn judge(&mut self, now: Instant, key: &(String, u16), bytes: &[u8]) {
        if self.key.is_none() {
            return self.judge_clear(now, key, bytes, None);
        }
        let at = host_port(&key.0, key.1);
        let Some((kind, exchange, message)) = sealed::split(bytes) else {
            let Some(id) = self.oldest(key) else { return };
            let said = match HandshakeReply::from_bytes(bytes) {
                Ok(HandshakeReply::Refused { message, .. }) => message,
                _ => "something else than a refusal, which is not looked at".to_owned(),
            };
            let text = format!(
                "the listener at {at} answered a sealed request in clear: {said:?}; both engines need the same key \
                 (key_file, KVFERRY_KEY_FILE)"
            );
            return self.end(id, Err(Error::new(ErrorKind::Incompatible, text)));
        };
        let found = self.requests.iter_mut().find(|(_, r)| {
            r.key == *key
                && r.exchange.as_ref().is_some_and(|(n, _)| *n == exchange)
                && matches!(r.phase, Phase::Sent(_))
        });
        let Some((&id, r)) = found else {
            log::debug!("kvferry client: a reply that nobody waits for came from {at}");
            return;
        };
        let Some((_, state)) = r.exchange.as_mut() else { return };
        let step = match kind {
            Kind::Opened => state.ask(exchange, message, &r.clear).map(|bytes| {
                r.bytes = bytes;
                r.phase = Phase::Unsent;
            }),
            Kind::Reply => match state.reply(message) {
                Ok(clear) => return self.judge_clear(now, key, &clear, Some(id)),
                Err(e) => Err(e),
            },
            Kind::Again => {
                r.phase = Phase::Resting(now + r.rest);
                r.rest = (r.rest * 2).min(self.limits.retry_max);
                Ok(())
            }
            Kind::Open | Kind::Ask => Err(Error::corrupt("a frame that only clients send")),
        };
        if let Err(e) = step {
            self.end(id, Err(e.context(format!("what listens on {at} answered"))));
        }
    }

    /// The request to `key` that was sent first.
    fn oldest(&self, key: &(String, u16)) -> Option<u64> {
        let sent = self.requests.iter().filter(|(_, r)| r.key == *key);
        sent.filter_map(|(id, r)| if let Phase::Sent(at) = r.phase { Some((at, *id)) } else { None })
            .min()
            .map(|(_, id)| id)
    }

    /// Takes a reply in clear. `expected`: the request that it came for, if the channel tells.
    fn judge_clear(&mut self, now: Instant, key: &(String, u16), bytes: &[u8], expected: Option<u64>) {
        let reply = HandshakeReply::from_bytes(bytes);
        let id = match &reply {
            Ok(
                HandshakeReply::Ranks { id, .. }
                | HandshakeReply::Pushed { id, .. }
                | HandshakeReply::Prefills { id, .. }
                | HandshakeReply::Refused { id, .. },
            ) => *id,
            Err(_) => 0,
        };
        // A listener that could not read a request cannot name it, but it answers in order: it means the oldest.
        let id = expected.unwrap_or_else(|| if id == 0 { self.oldest(key).unwrap_or(0) } else { id });
        let Some(r) = self.requests.get_mut(&id).filter(|r| r.key == *key) else {
            log::debug!("kvferry client: a reply that nobody waits for came from {}", host_port(&key.0, key.1));
            return;
        };
        if let Some(c) = self.connections.get_mut(key) {
            c.pause = self.limits.resend;
            c.renew_at = None;
        }
        if let Ok(HandshakeReply::Refused { code: RefusalCode::NotReady, .. }) = &reply
            && now + r.rest < r.deadline
        {
            r.phase = Phase::Resting(now + r.rest);
            r.rest = (r.rest * 2).min(self.limits.retry_max);
            r.refusal = reply.ok();
            return;
        }
        let result = reply.map_err(|e| e.context(format!("what listens on {} answered", host_port(&key.0, key.1))));
        self.requests.remove(&id);
        self.answers.push_back(Answer { id, result });
    }
}

impl Request {
    /// Makes ready to be sent, for the first time or again. With a key that is a new exchange each time.
    fn begin(&mut self, key: Option<&Key>) -> Result<()> {
        self.phase = Phase::Unsent;
        let Some(key) = key else {
            self.bytes.clone_from(&self.clear);
            return Ok(());
        };
        let number =
            getrandom::u64().map_err(|e| Error::new(ErrorKind::Io, format!("drawing an exchange's number: {e}")))?;
        let (exchange, bytes) = Exchange::begin(key, number)?;
        (self.exchange, self.bytes) = (Some((number, exchange)), bytes);
        Ok(())
    }
}

fn no_answer(r: &Request, now: Instant) -> Error {
    let at = host_port(&r.key.0, r.key.1);
    let waited = now.saturating_duration_since(r.asked).as_millis();
    if r.sends == 0 {
        return Error::new(
            ErrorKind::Unreachable,
            format!(
                "no connection to the handshake listener at {at} within {waited} ms; check that the producer engine \
                 runs, that this is the host and port of its head node, and that nothing between blocks TCP"
            ),
        );
    }
    Error::new(
        ErrorKind::Timeout,
        format!(
            "the handshake listener at {at} took {} requests and answered none within {waited} ms; check that it is a \
             kvferry listener and that its process is not stopped",
            r.sends
        ),
    )
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
