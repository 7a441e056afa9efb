//! The worker's driver on the progress thread: actions of the state machine become verbs of the agent and questions to
//! listeners, their outcomes become its inputs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::channel::{Command, WorkerChannel, WorkerFigures};
use super::trace::Tracer;
use crate::agent::{Context, Direction, Driver, Event, PeerId, TransferId};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::net::{Awaited, AwaitedPrefill, Client, ClientLimits, HandshakeAnswer, host_port, unanswered};
use crate::proto::handshake::HandshakeFailure;
use crate::proto::plan::CopyPlan;
use crate::proto::stats::Stats;
use crate::proto::time::Time;
use crate::proto::wire::{
    self, AgentMetadata, Cause, HandshakeRequest, Message, PeerMessage, RankMetadata, StepMetadata, WorkerReport,
};
use crate::proto::worker::{
    Action, AwaitId, PeerKey, PeerRef, SessionId, TransferFigures, TransferToken, WorkerMachine,
};
use crate::secret::Key;

pub(super) struct WorkerDriver {
    shared: Arc<WorkerChannel>,
    active: Option<ActiveWorker>,
    handshake_timeout: Duration,
    key: Option<Key>,
}

struct ActiveWorker {
    machine: WorkerMachine,
    shared: Arc<WorkerChannel>,
    client: Client,
    /// The share of the machine's own handshake timeout that the listener gets; the rest is for connecting. So the
    /// error that names the listener comes before the machine's, which can't.
    ask_timeout: Duration,
    epoch: Instant,
    local: Option<Arc<RankMetadata>>,
    /// The listeners that sessions have asked, and whose answer is awaited.
    handshakes: HashMap<SessionId, String>,
    links: HashMap<PeerId, PeerLink>,
    ids: HashMap<PeerKey, PeerId>,
    /// The agent's ids of the transfers that the machine may cancel.
    transfers: HashMap<TransferToken, TransferId>,
    totals: Stats,
    tracer: Option<Tracer>,
    /// The sum of the gauges in reports so far.
    reported: GaugeSnapshot,
    /// True if the agent's gauges may have changed since.
    changed: bool,
    /// The callers that asked for figures in this turn.
    figure_requests: Vec<SyncSender<WorkerFigures>>,
    limits: LogLimits,
}

/// Gauges at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct GaugeSnapshot {
    leases: i64,
    peers: i64,
    endpoints: i64,
    registered_bytes: i64,
}

/// Lines that repeat while something is wrong, by what they are about.
#[derive(Default)]
struct LogLimits {
    failures: HashMap<Cause, LogLimit>,
    handshakes: LogLimit,
    lost: LogLimit,
    unconnected: LogLimit,
    malformed: LogLimit,
}

/// The end of a line that stands for others too.
fn others(left_out: u64) -> String {
    if left_out == 0 { String::new() } else { format!(" ({left_out} similar lines suppressed)") }
}

/// One connection of the agent.
#[derive(Default)]
struct PeerLink {
    /// The state machine's name for it, if it asked for the connection.
    key: Option<PeerKey>,
    name: String,
    /// Which way bytes go.
    route: String,
    connected: bool,
    /// The protocol version in common with it, once it is connected.
    version: Option<u16>,
    /// True if we made it. One that the other side made is not closed when only we are done with it.
    ours: bool,
}

impl WorkerDriver {
    pub(super) fn new(shared: Arc<WorkerChannel>, handshake_timeout: Duration, key: Option<Key>) -> Self {
        WorkerDriver { shared, active: None, handshake_timeout, key }
    }
}

impl WorkerDriver {
    /// Takes up what the handle has asked for.
    fn serve(&mut self, context: &mut Context<'_>) {
        while let Some(command) = self.shared.pop() {
            match (command, self.active.as_mut()) {
                (Command::Begin(machine, tracer), None) => {
                    let shared = Arc::clone(&self.shared);
                    let client = Client::new(ClientLimits::default(), self.key.take());
                    let mut active = ActiveWorker::new(*machine, shared, client, self.handshake_timeout, context.now());
                    active.tracer = tracer;
                    if let Some(tracer) = &mut active.tracer {
                        tracer.set_origin(active.epoch);
                    }
                    if context.is_shutting_down() {
                        active.end(context.now());
                    }
                    self.active = Some(active);
                }
                (Command::Local(local), Some(active)) => {
                    active.changed = true;
                    active.machine.set_local(Arc::clone(&local));
                    active.local = Some(local);
                }
                (Command::Step(bytes), Some(active)) => active.step(context.now(), &bytes),
                (Command::Figures(reply), Some(active)) => active.figure_requests.push(reply),
                (Command::Begin(..), Some(_)) | (_, None) => {
                    log::error!("kvferry worker: a command came out of order and is ignored");
                }
            }
        }
    }
}

impl Drop for WorkerDriver {
    fn drop(&mut self) {
        if let Some(active) = &mut self.active {
            active.report_nothing_left();
        }
        self.shared.set_gone();
    }
}

impl Driver for WorkerDriver {
    fn turn(&mut self, context: &mut Context<'_>) -> Option<Instant> {
        self.serve(context);
        self.active.as_mut()?.turn(context)
    }

    fn poll_items<'a>(&'a self, items: &mut Vec<zmq::PollItem<'a>>) {
        if let Some(active) = &self.active {
            active.client.poll_items(items);
        }
    }

    fn shut_down(&mut self, context: &mut Context<'_>) {
        // Steps that came before it are taken up, to be reported or passed on.
        self.serve(context);
        if let Some(active) = &mut self.active {
            active.end(context.now());
            active.turn(context);
        }
    }

    fn finished(&self) -> bool {
        self.active.as_ref().is_none_or(|d| d.machine.is_drained())
    }
}

impl ActiveWorker {
    /// Ends all requests.
    fn end(&mut self, now: Instant) {
        let now = self.time(now);
        if self.shared.suspends.load(Ordering::Acquire) {
            self.machine.handle_suspend(now);
        } else {
            self.machine.handle_shutdown(now);
        }
    }

    fn new(
        machine: WorkerMachine,
        shared: Arc<WorkerChannel>,
        client: Client,
        handshake_timeout: Duration,
        epoch: Instant,
    ) -> ActiveWorker {
        ActiveWorker {
            machine,
            shared,
            client,
            ask_timeout: handshake_timeout.mul_f64(0.9),
            epoch,
            local: None,
            handshakes: HashMap::new(),
            links: HashMap::new(),
            ids: HashMap::new(),
            transfers: HashMap::new(),
            totals: Stats::default(),
            tracer: None,
            reported: GaugeSnapshot::default(),
            changed: false,
            figure_requests: Vec::new(),
            limits: LogLimits::default(),
        }
    }

    fn time(&self, at: Instant) -> Time {
        Time::default() + at.saturating_duration_since(self.epoch)
    }

    fn step(&mut self, now: Instant, bytes: &[u8]) {
        match StepMetadata::from_bytes(bytes) {
            Ok(step) => self.machine.handle_step(self.time(now), step),
            Err(e) => {
                self.shared.malformed_steps.fetch_add(1, Ordering::Relaxed);
                log::error!("kvferry worker: a step of {} bytes is ignored: {e}", bytes.len());
            }
        }
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Option<Instant> {
        let now = context.now();
        self.client.turn(now);
        while let Some(answer) = self.client.poll_answer() {
            self.answer(now, answer);
        }
        while let Some(Awaited { number, result }) = self.client.poll_prefill() {
            self.machine.handle_prefill(self.time(now), AwaitId(number), result);
        }
        while let Some(event) = context.poll_event() {
            self.event(now, event);
        }
        if self.machine.poll_timeout().is_some_and(|at| at <= self.time(now)) {
            self.machine.handle_timeout(self.time(now));
        }
        while let Some(action) = self.machine.poll_action() {
            self.act(context, now, action);
        }
        self.report(context);
        self.trace_events();
        // A question that could not be asked is answered already, and comes back in a turn of its own.
        let next = self.machine.poll_timeout().map(|at| self.epoch + Duration::from_micros(at.0));
        [next, self.client.next_deadline()].into_iter().flatten().min()
    }

    fn report(&mut self, context: &Context<'_>) {
        let mut report = self.machine.poll_report();
        if self.machine.config().telemetry {
            self.add_gauge_changes(context, &mut report);
        }
        if let Some(report) = report {
            self.publish(context.now(), report);
        }
        for reply in self.figure_requests.drain(..) {
            let figures = WorkerFigures { gauges: self.machine.gauges(), totals: self.totals.clone() };
            // The caller may have given up waiting.
            let _ = reply.try_send(figures);
        }
    }

    fn publish(&mut self, now: Instant, report: WorkerReport) {
        for failure in &report.failed_recving {
            let Some(left_out) = self.limits.failures.entry(failure.cause).or_default().pass(now) else {
                continue;
            };
            log::warn!(
                "kvferry worker {}: request {} was not received ({}): {}{}",
                report.rank,
                failure.request,
                failure.cause,
                failure.message,
                others(left_out)
            );
        }
        // The report first: somebody waits for it, and nobody for the sums, whose memory is in no cache.
        let stats = report.stats.clone();
        self.shared.publish(report);
        self.totals.merge(&stats);
    }

    fn trace_events(&mut self) {
        let Some(tracer) = &self.tracer else { return };
        let reported = self.time(Instant::now());
        while let Some(event) = self.machine.poll_trace() {
            tracer.record(event, reported);
        }
    }

    /// Adds to `report` (or makes one) what the gauges have changed by since the last one.
    fn add_gauge_changes(&mut self, context: &Context<'_>, report: &mut Option<WorkerReport>) {
        let count = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let mut now = GaugeSnapshot { leases: count(self.machine.leases() as u64), ..self.reported };
        if self.changed {
            let agent = context.stats();
            now.peers = count(agent.peers);
            now.endpoints = count(agent.endpoints);
            now.registered_bytes = count(agent.region_bytes);
            // Those being closed will be gone soon, without an event.
            self.changed = agent.endpoints != agent.peers;
        }
        self.report_gauges(now, report);
    }

    fn report_gauges(&mut self, now: GaugeSnapshot, report: &mut Option<WorkerReport>) {
        let before = std::mem::replace(&mut self.reported, now);
        if now == before {
            return;
        }
        let rank = self.machine.config().rank;
        let stats = &mut report.get_or_insert_with(|| WorkerReport::new(rank)).stats;
        stats.leases += now.leases - before.leases;
        stats.peers += now.peers - before.peers;
        stats.endpoints += now.endpoints - before.endpoints;
        stats.registered_bytes += now.registered_bytes - before.registered_bytes;
    }

    /// Reports that everything is gone, so that the figures of a worker that follows add up with this one's.
    fn report_nothing_left(&mut self) {
        let mut report = None;
        self.report_gauges(GaugeSnapshot::default(), &mut report);
        if let Some(report) = report {
            self.publish(Instant::now(), report);
        }
    }

    fn answer(&mut self, now: Instant, HandshakeAnswer { id, result }: HandshakeAnswer) {
        let session = SessionId(id);
        let Some(at) = self.handshakes.remove(&session) else { return };
        let reply = result.map_err(|e| HandshakeFailure { cause: unanswered(&e), message: e.message().to_owned() });
        match self.machine.handle_handshake(self.time(now), session, reply) {
            Some(Ok(notes)) => {
                for note in notes {
                    log::info!("kvferry worker: the engine at {at}: {note}; that is no obstacle");
                }
            }
            Some(Err(failure)) => {
                if let Some(left_out) = self.limits.handshakes.pass(now) {
                    let more = others(left_out);
                    log::warn!("kvferry worker: the handshake with {at} failed: {}{more}", failure.message);
                }
            }
            None => {}
        }
    }

    fn event(&mut self, now: Instant, event: Event) {
        let time = self.time(now);
        match event {
            Event::PeerConnected { peer, name, way: route, incarnation, version } => {
                self.changed = true;
                let link = self.links.entry(peer).or_default();
                link.connected = true;
                (link.name, link.route, link.version) = (name, route, Some(version));
                match link.key.clone() {
                    Some(key) => self.connected(time, peer, &key, ""),
                    None => {
                        let PeerLink { name, route, .. } = link;
                        log::info!(
                            "kvferry worker: {name} connected to us, incarnation {incarnation}, over {route}, protocol {version}"
                        );
                    }
                }
            }
            Event::PeerLost { peer, error } => {
                self.changed = true;
                let link = self.links.remove(&peer).unwrap_or_default();
                match link.key {
                    Some(key) => {
                        if let Some(left_out) = self.limits.lost.pass(now) {
                            log::warn!("kvferry worker: lost {key} ({}): {error}{}", link.name, others(left_out));
                        }
                        self.ids.remove(&key);
                        self.machine.handle_peer_lost(time, &PeerRef::Outbound(key), error.message());
                    }
                    None => log::info!("kvferry worker: {} is gone: {error}", link.name),
                }
                self.machine.handle_peer_lost(time, &PeerRef::Inbound(peer.raw()), error.message());
            }
            Event::Message { peer, data } => match PeerMessage::from_bytes(&data) {
                Ok(message) => {
                    let key = self.links.get(&peer).and_then(|link| link.key.clone());
                    let from = key.map_or(PeerRef::Inbound(peer.raw()), PeerRef::Outbound);
                    self.machine.handle_message(time, &from, message);
                }
                Err(e) => {
                    self.shared.malformed_messages.fetch_add(1, Ordering::Relaxed);
                    if let Some(left_out) = self.limits.malformed.pass(now) {
                        log::warn!("kvferry worker: a message of {peer} is ignored: {e}{}", others(left_out));
                    }
                }
            },
            Event::TransferDone {
                user_data, result, bytes, operations, posted_at, all_posted_at, finished_at, ..
            } => {
                let token = TransferToken(user_data);
                self.transfers.remove(&token);
                let result = match result {
                    Ok(()) => Ok(TransferFigures {
                        bytes,
                        operations,
                        posted_at: self.time(posted_at),
                        all_posted_at: self.time(all_posted_at),
                        finished_at: self.time(finished_at),
                    }),
                    Err(e) => Err((cause(e.kind()), e.message().to_owned())),
                };
                self.machine.handle_transfer_done(time, token, result);
            }
        }
    }

    fn act(&mut self, context: &mut Context<'_>, now: Instant, action: Action) {
        match action {
            Action::Handshake { session, engine, host, port, anew } => {
                if anew {
                    self.client.reconnect(now, &host, port);
                }
                self.handshakes.insert(session, host_port(&host, port));
                let query = HandshakeRequest::Query { id: session.0, engine: Some(engine), ranks: Vec::new() };
                self.client.ask(now, &host, port, query, now + self.ask_timeout);
            }
            Action::Await { number: AwaitId(number), engine, host, port, request, from_tokens } => {
                let prefill = AwaitedPrefill { request, from_tokens };
                self.client.await_prefill(now, number, &host, port, engine, prefill, self.ask_timeout);
            }
            Action::Forget { number: AwaitId(number) } => self.client.forget_prefill(number),
            Action::Connect { peer, metadata } => self.connect(context, now, peer, &metadata),
            Action::Transfer { token, peer, plan } => match self.transfer(context, &peer, plan, token) {
                Ok(id) => {
                    self.transfers.insert(token, id);
                }
                Err(e) => {
                    let result = Err((cause(e.kind()), e.message().to_owned()));
                    self.machine.handle_transfer_done(self.time(now), token, result);
                }
            },
            Action::Cancel { token } => {
                if let Some(id) = self.transfers.get(&token)
                    && let Err(e) = context.cancel(*id)
                {
                    log::debug!("kvferry worker: {e}");
                }
            }
            Action::Send { peer, message } => {
                if let Err(e) = self.send(context, &peer, &message) {
                    log::debug!("kvferry worker: a message to {peer} was not sent: {e}");
                }
            }
            Action::Disconnect { peer } => {
                self.changed = true;
                let Some(id) = self.ids.remove(&peer) else { return };
                let Some(link) = self.links.get_mut(&id) else { return };
                link.key = None;
                if link.ours {
                    self.links.remove(&id);
                    if let Err(e) = context.disconnect(id) {
                        log::debug!("kvferry worker: {e}");
                    }
                }
            }
        }
    }

    fn connect(&mut self, context: &mut Context<'_>, now: Instant, key: PeerKey, metadata: &AgentMetadata) {
        let time = self.time(now);
        let id = match context.connect(metadata) {
            Ok(id) => id,
            Err(e) => {
                if let Some(left_out) = self.limits.unconnected.pass(now) {
                    log::warn!("kvferry worker: no connection to {key}: {e}{}", others(left_out));
                }
                self.machine.handle_peer_lost(time, &PeerRef::Outbound(key), e.message());
                return;
            }
        };
        let link = self.links.entry(id).or_insert_with(|| PeerLink { ours: true, ..PeerLink::default() });
        let earlier = link.key.replace(key.clone());
        let connected = link.connected;
        self.ids.insert(key.clone(), id);
        self.changed = true;
        // The agent has one connection to an agent. What the machine called it until now ends, so that nothing waits for it.
        if let Some(earlier) = earlier {
            self.ids.remove(&earlier);
            let text = format!("its agent serves {key} now");
            self.machine.handle_peer_lost(time, &PeerRef::Outbound(earlier), &text);
        }
        if connected {
            self.connected(time, id, &key, ", by the connection that it had made");
        }
    }

    /// Logs the connection: to which rank, over which transport, and of what shape its engine is.
    fn connected(&mut self, time: Time, peer: PeerId, key: &PeerKey, how: &str) {
        if let Some(PeerLink { name, route, .. }) = self.links.get(&peer) {
            let shape = self.machine.shape_of(key).map(|shape| format!(", an engine of {shape}"));
            let own = self.local.as_ref().map(|local| format!("; this engine is of {}", local.shape));
            let (shape, own) = (shape.unwrap_or_default(), own.unwrap_or_default());
            log::info!("kvferry worker: connected to {key} ({name}){shape}{how}, over {route}{own}");
        }
        self.machine.handle_connected(time, key);
    }

    fn transfer(
        &mut self,
        context: &mut Context<'_>,
        peer: &PeerKey,
        plan: CopyPlan,
        token: TransferToken,
    ) -> Result<TransferId> {
        let gone = || Error::new(ErrorKind::PeerDied, format!("the connection to {peer} is gone"));
        let id = *self.ids.get(peer).ok_or_else(gone)?;
        // The agent may know already that the peer is lost, while its word of that still waits to be taken.
        let started = context.transfer(id, Direction::Read, plan, token.0);
        started.map_err(|e| if context.has_peer(id) { e } else { gone() })
    }

    fn send(&self, context: &mut Context<'_>, peer: &PeerRef, message: &PeerMessage) -> Result<()> {
        let id = match peer {
            PeerRef::Outbound(key) => *self.ids.get(key).ok_or_else(|| Error::not_found("the connection is gone"))?,
            PeerRef::Inbound(raw) => PeerId::from_raw(*raw),
        };
        let version = self.links.get(&id).and_then(|link| link.version).unwrap_or(wire::OLDEST);
        context.send(id, message.to_bytes_in(version)?)
    }
}

/// The cause that a failed transfer is counted under.
fn cause(kind: ErrorKind) -> Cause {
    match kind {
        // What is not found any more is memory of a peer that shuts down or sleeps.
        ErrorKind::PeerDied | ErrorKind::Unreachable | ErrorKind::NotFound => Cause::PeerDied,
        ErrorKind::Cancelled => Cause::Aborted,
        ErrorKind::Timeout => Cause::Timeout,
        ErrorKind::ShutDown => Cause::ShutDown,
        ErrorKind::DigestMismatch => Cause::DigestMismatch,
        ErrorKind::InvalidArgument | ErrorKind::OutOfRange => Cause::InvalidRequest,
        _ => Cause::TransportError,
    }
}
