//! The producer's half: leases, and the judgement of reads.
//!
//! A request's blocks are safe to read from its grant until this half reports `finished_sending`: the scheduler side
//! frees them only then. So a read is right exactly when its `Done` arrives while the lease holds.
//!
//! A lease is read by the ranks of the consumer engines that name it by its number while it holds: one, or several where the
//! samples of a prompt were dealt to data-parallel engines. Each rank is one reader, however many of its engine's requests
//! read the blocks. It is done with the `Done` that needs no more, or with its `Release`, and counts again when it needs the
//! lease again while that holds. The lease is over when all readers of these engines are done.

use std::collections::HashMap;
use std::time::Duration;

use super::action::PeerRef;
use super::config::{WorkerMachineConfig, ms};
use super::output::MachineOutput;
use super::timers::{Deadlines, Memory};
use super::trace::{LeaseEnd, TraceEvent};
use crate::ids::{EngineId, Incarnation, RankId, RequestId};
use crate::time::Time;
use crate::wire::{Grant, PeerMessage, Reader, Verdict};

/// The most readers of one request on one rank; far above any ratio of tensor-parallel sizes. Bounds what a peer can
/// make this machine remember.
const MAX_READERS: usize = 1024;

/// The most consumer engines of one lease.
const MAX_CONSUMERS: usize = 64;

/// The most reads of one reader that are remembered for repeated `Done`s.
const MAX_SERIALS: usize = 64;

/// The most former leases of one request's name that are remembered.
const MAX_FORMER: usize = 8;

/// Heartbeats that do not name the lease may come from anybody. They renew it until it is this many times its length old,
/// for consumers of releases that cannot name it.
const UNNAMED_LENGTHS: u32 = 4;

/// The ranks that have said `Done` or `Release`.
type Readers = HashMap<(EngineId, RankId), ReaderState>;

/// The state of one consumer rank that reads a lease.
#[derive(Debug)]
struct ReaderState {
    /// The life of its agent. A later life takes the place of an earlier one.
    incarnation: Incarnation,
    /// The numbers of its reads that were judged valid.
    judged: Vec<u64>,
    /// True if it still needs the lease.
    open: bool,
}

#[derive(Debug)]
struct Lease {
    /// This engine's name for it; leases are found by the consumers' name.
    request: RequestId,
    id: u64,
    length: Duration,
    granted: Time,
    /// Not counted among the sends.
    history: bool,
    /// The ids of earlier leases of this name.
    former: Vec<u64>,
    /// True if an engine has named it. From then on, engines that cannot name it do not count.
    named: bool,
    /// The number of readers to hear from, per consumer engine, as far as they have said.
    expected: HashMap<EngineId, usize>,
    readers: Readers,
}

/// The memory of a request that is over.
#[derive(Debug)]
struct Tombstone {
    lease_id: u64,
    former: Vec<u64>,
    readers: Readers,
    /// The answer to a read that was not judged while the lease held.
    otherwise: Verdict,
}

/// A message that came before its request's grant.
#[derive(Debug)]
enum EarlyMessage {
    Done { from: PeerRef, message: ReaderMessage, serial: u64 },
    Release(ReaderMessage),
}

/// A reader's message: who it is and which lease it means.
#[derive(Debug, Clone)]
pub(super) struct ReaderMessage {
    pub(super) reader: Reader,
    pub(super) readers: u32,
    pub(super) lease_id: u64,
    /// True if it still needs the lease.
    pub(super) more: bool,
}

/// Which leases a heartbeat renews, see [`PeerMessage::Heartbeat`].
#[derive(Debug)]
pub(super) struct LeaseRenewal {
    pub(super) requests: Vec<RequestId>,
    pub(super) leases: Vec<u64>,
    pub(super) reader: Option<Reader>,
}

#[derive(Debug)]
pub(super) struct Producer {
    leases: HashMap<RequestId, Lease>,
    early: HashMap<RequestId, Vec<EarlyMessage>>,
    early_count: usize,
    early_keep: Duration,
    early_most: usize,
    tombstones: Memory<RequestId, Tombstone>,
    deadlines: Deadlines<ProducerTimer>,
    closed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ProducerTimer {
    Lease(RequestId),
    Early(RequestId),
}

impl Producer {
    pub(super) fn new(config: &WorkerMachineConfig) -> Self {
        Producer {
            leases: HashMap::new(),
            early: HashMap::new(),
            early_count: 0,
            early_keep: ms(config.settings.early_message_ms),
            early_most: config.early_messages,
            tombstones: Memory::new(ms(config.settings.tombstone_ms), config.tombstones),
            deadlines: Deadlines::new(),
            closed: false,
        }
    }

    pub(super) fn leases(&self) -> usize {
        self.leases.len()
    }

    pub(super) fn early(&self) -> usize {
        self.early_count
    }

    pub(super) fn tombstones(&self) -> usize {
        self.tombstones.len()
    }

    /// A request's blocks are kept from now on. A grant for a lease that still holds renews it; one for a request that
    /// is over makes a new one.
    pub(super) fn grant(&mut self, now: Time, grant: Grant, out: &mut MachineOutput) {
        let Grant { request: own, lease_ms, lease_id, name, history } = grant;
        if self.closed {
            out.report.finished_sending.push(own);
            return;
        }
        if name.is_some() {
            out.report.granted.push(own.clone());
        }
        let request = name.unwrap_or_else(|| own.clone());
        // The scheduler side gives no name twice.
        if self.leases.get(&request).is_some_and(|lease| lease.request != own) {
            self.end(now, &request, LeaseEnd::Dropped, out);
        }
        let former = self.tombstones.get(&request).map(Tombstone::ids).unwrap_or_default();
        self.tombstones.remove(&request);
        let length = ms(lease_ms.max(1));
        self.deadlines.set(ProducerTimer::Lease(request.clone()), now + length);
        if !self.leases.contains_key(&request) {
            out.count(|stats| stats.sends_granted += u64::from(!history));
            out.trace(|| TraceEvent::SendBegan { request: request.clone(), at: now });
        }
        self.leases
            .entry(request.clone())
            .and_modify(|lease| (lease.id, lease.length, lease.granted) = (lease_id, length, now))
            .or_insert_with(|| Lease {
                request: own,
                id: lease_id,
                length,
                granted: now,
                history,
                former,
                named: false,
                expected: HashMap::new(),
                readers: Readers::new(),
            });
        for early in self.take_early(&request) {
            match early {
                EarlyMessage::Done { from, message, serial } => {
                    self.done(now, &from, request.clone(), message, serial, out)
                }
                EarlyMessage::Release(message) => self.release(now, request.clone(), message, out),
            }
        }
    }

    /// A request ended without a hand-over.
    pub(super) fn dropped(&mut self, now: Time, request: RequestId, out: &mut MachineOutput) {
        if self.leases.contains_key(&request) {
            self.end(now, &request, LeaseEnd::Dropped, out);
            return;
        }
        self.refuse_early(&request, out);
        // What is remembered of an earlier request of this name says no less.
        if self.tombstones.get(&request).is_none() {
            let tombstone =
                Tombstone { lease_id: 0, former: Vec::new(), readers: Readers::new(), otherwise: Verdict::Unknown };
            self.tombstones.insert(now, request, tombstone);
        }
    }

    /// Renews the leases that still hold, if a rank names them that may read them.
    pub(super) fn heartbeat(&mut self, now: Time, renewal: LeaseRenewal, out: &mut MachineOutput) {
        let LeaseRenewal { requests, leases, reader } = renewal;
        for (index, request) in requests.into_iter().enumerate() {
            let Some(lease) = self.leases.get_mut(&request) else { continue };
            let lease_id = leases.get(index).copied().unwrap_or(0);
            let due = match &reader {
                Some(reader) if lease_id != 0 && lease_id == lease.id && lease.admits(&reader.engine, lease_id) => {
                    lease.reopen(reader);
                    now + lease.length
                }
                _ if lease_id == 0 && !lease.named => {
                    (now + lease.length).min(lease.granted + lease.length * UNNAMED_LENGTHS)
                }
                _ => continue,
            };
            let timer = ProducerTimer::Lease(request);
            if self.deadlines.get(&timer).is_some_and(|set| set < due) {
                self.deadlines.set(timer, due);
                out.count(|stats| stats.renewals += 1);
            }
        }
    }

    /// A reader has completed its read number `serial`: judges it.
    pub(super) fn done(
        &mut self,
        now: Time,
        from: &PeerRef,
        request: RequestId,
        message: ReaderMessage,
        serial: u64,
        out: &mut MachineOutput,
    ) {
        let verdict = if let Some(lease) = self.leases.get_mut(&request) {
            lease.record(message, Some(serial))
        } else if let Some(tombstone) = self.tombstone(&request, &message) {
            if tombstone.judged(&message.reader, serial) { Verdict::Valid } else { tombstone.otherwise }
        } else {
            let early = EarlyMessage::Done { from: from.clone(), message, serial };
            if self.keep_early(now, &request, early) {
                return;
            }
            Verdict::Unknown
        };
        out.send(from.clone(), PeerMessage::Verdict { request: request.clone(), verdict, serial });
        self.end_if_over(now, &request, out);
    }

    /// A reader declines to read (any more).
    pub(super) fn release(&mut self, now: Time, request: RequestId, message: ReaderMessage, out: &mut MachineOutput) {
        if let Some(lease) = self.leases.get_mut(&request) {
            lease.record(message, None);
            self.end_if_over(now, &request, out);
        } else if self.tombstone(&request, &message).is_none() {
            self.keep_early(now, &request, EarlyMessage::Release(message));
        }
    }

    pub(super) fn advance(&mut self, now: Time, out: &mut MachineOutput) {
        while let Some(timer) = self.deadlines.expired(now) {
            match timer {
                ProducerTimer::Lease(request) => {
                    let history = self.leases.get(&request).is_some_and(|lease| lease.history);
                    out.count(|stats| stats.sends_expired += u64::from(!history));
                    self.end(now, &request, LeaseEnd::Expired, out);
                }
                ProducerTimer::Early(request) => self.refuse_early(&request, out),
            }
        }
        self.tombstones.advance(now);
    }

    pub(super) fn next_timeout(&mut self) -> Option<Time> {
        [self.deadlines.next(), self.tombstones.next_due()].into_iter().flatten().min()
    }

    pub(super) fn shut_down(&mut self, now: Time, out: &mut MachineOutput) {
        self.closed = true;
        let mut requests: Vec<RequestId> = self.leases.keys().cloned().collect();
        requests.sort();
        for request in requests {
            self.end(now, &request, LeaseEnd::Dropped, out);
        }
        let mut requests: Vec<RequestId> = self.early.keys().cloned().collect();
        requests.sort();
        for request in requests {
            self.refuse_early(&request, out);
        }
    }

    fn end_if_over(&mut self, now: Time, request: &RequestId, out: &mut MachineOutput) {
        let Some(lease) = self.leases.get(request) else { return };
        if !lease.is_over() {
            return;
        }
        let counted = u64::from(!lease.history);
        let how = if lease.readers.values().any(|state| !state.judged.is_empty()) {
            out.count(|stats| stats.sends_read += counted);
            LeaseEnd::Read
        } else {
            out.count(|stats| stats.sends_released += counted);
            LeaseEnd::Released
        };
        self.end(now, request, how, out);
    }

    /// The lease is over: the scheduler side may free the blocks, so no read counts from now on.
    fn end(&mut self, now: Time, request: &RequestId, how: LeaseEnd, out: &mut MachineOutput) {
        let Some(lease) = self.leases.remove(request) else { return };
        out.trace(|| TraceEvent::SendEnded { request: request.clone(), at: now, how });
        self.deadlines.cancel(&ProducerTimer::Lease(request.clone()));
        self.tombstones.insert(
            now,
            request.clone(),
            Tombstone { lease_id: lease.id, former: lease.former, readers: lease.readers, otherwise: Verdict::Expired },
        );
        out.report.finished_sending.push(lease.request);
    }

    /// The memory of the request. None if the message means an unknown lease, whose grant is still to come: a request without a
    /// lease says nothing of a later one of its name.
    fn tombstone(&self, request: &RequestId, message: &ReaderMessage) -> Option<&Tombstone> {
        let known = |t: &&Tombstone| {
            t.lease_id == message.lease_id || message.lease_id == 0 || t.former.contains(&message.lease_id)
        };
        self.tombstones.get(request).filter(known)
    }

    /// Keeps an early message; false if there was no room.
    fn keep_early(&mut self, now: Time, request: &RequestId, early: EarlyMessage) -> bool {
        if self.closed || self.early_count >= self.early_most {
            return false;
        }
        if !self.early.contains_key(request) {
            self.deadlines.set(ProducerTimer::Early(request.clone()), now + self.early_keep);
        }
        self.early.entry(request.clone()).or_default().push(early);
        self.early_count += 1;
        true
    }

    fn take_early(&mut self, request: &RequestId) -> Vec<EarlyMessage> {
        let Some(early) = self.early.remove(request) else { return Vec::new() };
        self.deadlines.cancel(&ProducerTimer::Early(request.clone()));
        self.early_count = self.early_count.saturating_sub(early.len());
        early
    }

    fn refuse_early(&mut self, request: &RequestId, out: &mut MachineOutput) {
        for early in self.take_early(request) {
            if let EarlyMessage::Done { from, serial, .. } = early {
                let request = request.clone();
                out.send(from, PeerMessage::Verdict { request, verdict: Verdict::Unknown, serial });
            }
        }
    }
}

impl Lease {
    /// True if every reader of every consumer is done with the lease; false before the first has said so.
    fn is_over(&self) -> bool {
        let heard = |(engine, expected): (&EngineId, &usize)| {
            let over = |((of, _), reader): (&(EngineId, RankId), &ReaderState)| of == engine && !reader.open;
            self.readers.iter().filter(|entry| over(*entry)).count() >= *expected
        };
        !self.expected.is_empty() && self.expected.iter().all(heard)
    }

    /// True if a rank of `engine` that names the lease by `lease_id`, 0 if it cannot, may be one of its readers.
    fn admits(&mut self, engine: &EngineId, lease_id: u64) -> bool {
        if lease_id != 0 && lease_id == self.id {
            if !std::mem::replace(&mut self.named, true) {
                self.readers.retain(|(other, _), _| other == engine);
                self.expected.retain(|other, _| other == engine);
            }
            if self.expected.len() >= MAX_CONSUMERS && !self.expected.contains_key(engine) {
                return false;
            }
            self.expected.entry(engine.clone()).or_insert(1);
            return true;
        }
        !self.named || self.expected.contains_key(engine)
    }

    /// A reader needs the lease again after it has said that it does not.
    fn reopen(&mut self, reader: &Reader) {
        if let Some(state) = self.readers.get_mut(&(reader.engine.clone(), reader.rank))
            && state.incarnation == reader.incarnation
        {
            state.open = true;
        }
    }

    /// Records what a reader said while the lease holds: that it has completed read `serial`, or declines.
    fn record(&mut self, message: ReaderMessage, serial: Option<u64>) -> Verdict {
        let ReaderMessage { reader, readers, lease_id, more } = message;
        if lease_id != 0 && self.id != 0 && lease_id != self.id {
            return Verdict::Expired;
        }
        if !self.admits(&reader.engine, lease_id) {
            return Verdict::Unknown;
        }
        let key = (reader.engine, reader.rank);
        if self.readers.len() >= MAX_READERS && !self.readers.contains_key(&key) {
            return Verdict::Unknown;
        }
        let announced = usize::try_from(readers).unwrap_or(MAX_READERS).clamp(1, MAX_READERS);
        let expected = self.expected.entry(key.0.clone()).or_insert(1);
        *expected = announced.max(*expected);
        let new = || ReaderState { incarnation: reader.incarnation, judged: Vec::new(), open: false };
        let state = self.readers.entry(key).or_insert_with(new);
        if state.incarnation != reader.incarnation {
            *state = new();
        }
        if let Some(serial) = serial {
            if state.judged.contains(&serial) {
                return Verdict::Valid;
            }
            if state.judged.len() >= MAX_SERIALS {
                state.judged.remove(0);
            }
            state.judged.push(serial);
        }
        state.open = more;
        Verdict::Valid
    }
}

impl Tombstone {
    fn judged(&self, reader: &Reader, serial: u64) -> bool {
        self.readers
            .get(&(reader.engine.clone(), reader.rank))
            .is_some_and(|state| state.incarnation == reader.incarnation && state.judged.contains(&serial))
    }

    /// The ids of its lease and of those before it, the latest last.
    fn ids(&self) -> Vec<u64> {
        let all = self.former.iter().copied().chain([self.lease_id]);
        all.skip((self.former.len() + 1).saturating_sub(MAX_FORMER)).collect()
    }
}
