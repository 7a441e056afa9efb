//! Transfers: validated, expanded and posted in a window, ended exactly once.
//!
//! A transfer is *stopped* when it is cancelled, when one of its operations fails, or when its peer is lost: nothing
//! more is posted for it. It is *over* when in addition none of its operations is in flight. Only then is its event
//! made and its hold on the registered regions given up.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::config::Window;
use super::event::{Direction, Event};
use super::ferry::Engine;
use super::ids::{PeerId, TransferId};
use super::operations::InFlight;
use super::served::{CHUNK_BYTES, CHUNK_PIECES, Chunk, Piece, Service};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::proto::plan::{CopyPlan, Expander, Operation};
use crate::proto::wire::MemoryKind;
use crate::ucx::{Completion, Posted};

/// Bounds of one round of posting, so that messages and timers wait for a few milliseconds at most: CMA copies during
/// posting and progress, at 5 to 10 GB/s.
const TURN_BYTES: u64 = 16 << 20;
const TURN_TIME: Duration = Duration::from_millis(1);

/// What one transfer may post before the next one of the same peer gets its turn.
const QUANTUM_OPERATIONS: u32 = 8;
const QUANTUM_BYTES: u64 = 1 << 20;

pub(super) struct Transfer {
    peer: PeerId,
    direction: Direction,
    expander: Expander,
    /// The operation to post next; `None` when all are posted.
    next: Option<Operation>,
    /// Local regions that it uses, each once.
    regions: Vec<u32>,
    in_flight: u32,
    posted: u64,
    bytes: u64,
    posted_at: Option<Instant>,
    /// Why it was stopped, if it was.
    stopped: Option<Error>,
    /// When its operations must have ended after it was stopped.
    grace: Option<Instant>,
    /// One-sided writes were posted that no flush covers yet.
    unflushed: bool,
    /// Whether its runs are so short that messages carry them better than an operation each.
    gathered: bool,
    /// What is left to do to prove that the right bytes came.
    proof: Proof,
}

/// See [`AgentConfig::verify`](super::AgentConfig::verify).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    /// Nothing.
    No,
    /// The peer's digests are to be asked for when all bytes are there.
    Due,
    /// They are being asked for.
    Asking,
}

/// All transfers that are not over.
#[derive(Default)]
pub(super) struct Transfers {
    table: HashMap<TransferId, Transfer>,
    /// Per peer, those that have something to post, in the order of their turns.
    queues: BTreeMap<PeerId, VecDeque<TransferId>>,
    /// Ends of grace.
    graces: BTreeSet<(Instant, TransferId)>,
    operations: u64,
    bytes: u64,
}

impl Transfers {
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Operations in flight and their bytes.
    pub(super) fn in_flight(&self) -> (u64, u64) {
        (self.operations, self.bytes)
    }

    pub(super) fn ids(&self) -> Vec<TransferId> {
        self.table.keys().copied().collect()
    }

    /// The next end of a grace.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.graces.first().map(|(at, _)| *at)
    }
}

/// Whether an operation of `len` bytes may join what is in flight.
fn fits(window: Window, operations: u64, bytes: u64, len: u64) -> bool {
    operations == 0 || (operations < u64::from(window.operations) && bytes.saturating_add(len) <= window.bytes)
}

impl Engine {
    /// Takes a transfer up. On an error nothing was.
    pub(super) fn start_transfer(
        &mut self,
        id: TransferId,
        peer: PeerId,
        direction: Direction,
        plan: CopyPlan,
        now: Instant,
    ) -> Result<()> {
        self.check_open()?;
        let remote = self.peers.get(peer)?;
        let (mut locals, mut remotes) = (BTreeSet::new(), BTreeSet::new());
        for segment in plan.segments.iter() {
            if locals.insert(segment.local_region) {
                self.registry.check_live(segment.local_region)?;
            }
            if remotes.insert(segment.remote_region) {
                remote.check_region(segment.remote_region)?;
            }
        }
        plan.check(self.registry.lens(), remote.lens())?;
        let gathered = plan.mean_run().is_some_and(|run| run < self.config.gather_below);
        let mut expander = plan.expand(self.config.max_operation_bytes);
        let next = expander.next();
        let regions: Vec<u32> = locals.into_iter().collect();
        self.registry.enter(&regions);
        let transfer = Transfer {
            peer,
            direction,
            expander,
            next,
            regions,
            in_flight: 0,
            posted: 0,
            bytes: 0,
            posted_at: None,
            stopped: None,
            grace: None,
            unflushed: false,
            gathered,
            proof: if self.config.verify && direction == Direction::Read { Proof::Due } else { Proof::No },
        };
        if transfer.next.is_some() {
            self.transfers.queues.entry(peer).or_default().push_back(id);
        }
        self.transfers.table.insert(id, transfer);
        self.settle(id, now);
        Ok(())
    }

    /// Ends a transfer that could not be taken up.
    pub(super) fn refuse_transfer(&mut self, id: TransferId, peer: PeerId, error: Error, now: Instant) {
        self.stats.transfers_failed += 1;
        self.shared.live().transfers.remove(&id);
        self.events.push_back(Event::TransferDone {
            id,
            peer,
            result: Err(error),
            bytes: 0,
            operations: 0,
            posted_at: now,
            finished_at: now,
        });
    }

    /// Posts what the windows allow, in turns. Returns whether anything was posted.
    pub(super) fn post_transfers(&mut self) -> bool {
        let end = Instant::now() + TURN_TIME;
        let mut left = TURN_BYTES;
        let mut any = false;
        loop {
            let mut progressed = false;
            // Few: the peers that have something to post.
            let peers: Vec<PeerId> = self.transfers.queues.keys().copied().collect();
            for peer in peers {
                let posted = self.post_turn(peer);
                progressed |= posted > 0;
                left = left.saturating_sub(posted);
            }
            any |= progressed;
            if !progressed || left == 0 || Instant::now() >= end {
                return any;
            }
        }
    }

    /// Gives the first transfer in a peer's queue its turn. Returns the bytes posted.
    fn post_turn(&mut self, peer_id: PeerId) -> u64 {
        let Some(queue) = self.transfers.queues.get_mut(&peer_id) else { return 0 };
        let Ok(peer) = self.peers.get_mut(peer_id) else { return 0 };
        if !peer.is_ready() {
            return 0;
        }
        // Those that were stopped or are gone have lost their place.
        let live = |id: &TransferId| self.transfers.table.get(id).is_some_and(|t| t.stopped.is_none());
        while queue.front().is_some_and(|id| !live(id)) {
            queue.pop_front();
        }
        let Some(id) = queue.pop_front() else {
            self.transfers.queues.remove(&peer_id);
            return 0;
        };
        let Some(transfer) = self.transfers.table.get_mut(&id) else { return 0 };
        if let Some(operation) = transfer.next {
            let local = self.registry.range(operation.local_region).map(|range| range.kind());
            let direct = local.is_some_and(|kind| {
                // Device memory would have to be gathered by a copy per run as well.
                let gathered = transfer.gathered && peer.is_host(operation.remote_region) && kind == MemoryKind::Host;
                !gathered && peer.is_direct(operation.remote_region, kind)
            });
            if !direct || transfer.proof == Proof::Asking {
                return self.post_chunk(peer_id, id);
            }
        }
        let (mut bytes, mut operations) = (0, 0);
        let mut error = None;
        while let Some(operation) = transfer.next {
            if operations >= QUANTUM_OPERATIONS
                || bytes >= QUANTUM_BYTES
                || !fits(self.config.peer_window, peer.operations.into(), peer.bytes, operation.len)
                || !fits(self.config.total_window, self.transfers.operations, self.transfers.bytes, operation.len)
            {
                break;
            }
            let (Some(memory), Some((base, rkey)), Ok(offset), Ok(len)) = (
                self.registry.memory(operation.local_region),
                peer.region(operation.remote_region),
                usize::try_from(operation.local_offset),
                usize::try_from(operation.len),
            ) else {
                error = Some(Error::not_found("a region of the plan is gone"));
                break;
            };
            let token = self.operations.insert(InFlight::Copy { transfer: id, len: operation.len });
            let remote = base.saturating_add(operation.remote_offset);
            let posted = match transfer.direction {
                Direction::Read => peer.endpoint.get(rkey, remote, memory, offset, len, token),
                Direction::Write => peer.endpoint.put(rkey, remote, memory, offset, len, token),
            };
            match posted {
                Ok(Posted::Pending) => {
                    transfer.in_flight += 1;
                    peer.operations += 1;
                    peer.bytes += operation.len;
                    self.transfers.operations += 1;
                    self.transfers.bytes += operation.len;
                }
                Ok(Posted::Done) => {
                    self.operations.remove(token);
                    transfer.bytes += operation.len;
                }
                Err(e) => {
                    self.operations.remove(token);
                    error = Some(ucx_error(e));
                    break;
                }
            }
            transfer.posted_at.get_or_insert_with(Instant::now);
            transfer.posted += 1;
            transfer.unflushed = transfer.direction == Direction::Write;
            self.stats.operations += 1;
            bytes += operation.len;
            operations += 1;
            transfer.next = transfer.expander.next();
        }
        if transfer.next.is_some() && error.is_none() {
            // It keeps its turn if the window had no room for any of it.
            if operations == 0 { queue.push_front(id) } else { queue.push_back(id) }
        }
        if queue.is_empty() {
            self.transfers.queues.remove(&peer_id);
        }
        let now = Instant::now();
        match error {
            Some(error) => self.stop(id, error, now),
            None => self.settle(id, now),
        }
        bytes
    }

    /// Posts one chunk of a transfer that the peer serves: the turn of [`Engine::post_turn`] for those.
    fn post_chunk(&mut self, peer_id: PeerId, id: TransferId) -> u64 {
        let (Some(transfer), Ok(peer)) = (self.transfers.table.get_mut(&id), self.peers.get_mut(peer_id)) else {
            return 0;
        };
        let (mut local, mut remote, mut bytes) = (Vec::new(), Vec::new(), 0);
        let room = fits(self.config.peer_window, peer.operations.into(), peer.bytes, CHUNK_BYTES)
            && fits(self.config.total_window, self.transfers.operations, self.transfers.bytes, CHUNK_BYTES);
        while let Some(operation) = transfer.next.filter(|_| room && bytes < CHUNK_BYTES && local.len() < CHUNK_PIECES)
        {
            // At most CHUNK_BYTES, so it fits 32 bits.
            let len = operation.len.min(CHUNK_BYTES - bytes) as u32;
            local.push(Piece { region: operation.local_region, offset: operation.local_offset, len });
            remote.push(Piece { region: operation.remote_region, offset: operation.remote_offset, len });
            bytes += u64::from(len);
            transfer.next = match operation.len - u64::from(len) {
                0 => transfer.expander.next(),
                left => Some(Operation {
                    local_offset: operation.local_offset + u64::from(len),
                    remote_offset: operation.remote_offset + u64::from(len),
                    len: left,
                    ..operation
                }),
            };
        }
        let more = transfer.next.is_some();
        if let Some(queue) = self.transfers.queues.get_mut(&peer_id) {
            match (more, room) {
                (true, true) => queue.push_back(id),
                (true, false) => queue.push_front(id),
                (false, _) if queue.is_empty() => drop(self.transfers.queues.remove(&peer_id)),
                (false, _) => {}
            }
        }
        if bytes == 0 {
            return 0;
        }
        let service = match (transfer.proof, transfer.direction) {
            (Proof::Asking, _) => Service::Digest,
            (_, Direction::Read) => Service::Read,
            (_, Direction::Write) => Service::Write,
        };
        transfer.in_flight += 1;
        transfer.posted += u64::from(service != Service::Digest);
        transfer.posted_at.get_or_insert_with(Instant::now);
        peer.operations += 1;
        peer.bytes += bytes;
        self.transfers.operations += 1;
        self.transfers.bytes += bytes;
        self.stats.operations += 1;
        let chunk = Chunk { transfer: id, peer: peer_id, service, local, bytes };
        if let Err(error) = self.request_chunk(chunk, &remote) {
            self.left_flight(id, bytes, 0);
            self.ended(id, Err(error), Instant::now());
        }
        bytes
    }

    /// Takes the operations that UCX has ended.
    pub(super) fn reap_completions(&mut self, now: Instant) {
        while let Some(Completion { token, result, .. }) = self.worker.poll_completion() {
            match self.operations.remove(token) {
                Some(InFlight::Copy { transfer, len }) => self.copied(transfer, len, result.map_err(ucx_error), now),
                Some(InFlight::Flush { transfer }) => {
                    if let Some(entry) = self.transfers.table.get_mut(&transfer) {
                        entry.in_flight = entry.in_flight.saturating_sub(1);
                    }
                    self.ended(transfer, result.map_err(ucx_error), now);
                }
                Some(InFlight::Message { peer, reserved }) => {
                    self.message_ended(peer, reserved, result.map_err(ucx_error), now);
                }
                Some(InFlight::Service { peer, held }) => {
                    self.service_ended(peer, held, result.map_err(ucx_error), now);
                }
                Some(InFlight::Goodbye) => {}
                Some(InFlight::Farewell) => self.left(token),
                None => log::error!("agent {}: UCX ended an unknown operation", self.config.name),
            }
        }
    }

    fn copied(&mut self, id: TransferId, len: u64, result: Result<()>, now: Instant) {
        self.left_flight(id, len, if result.is_ok() { len } else { 0 });
        self.ended(id, result, now);
    }

    /// The reply to a chunk came, or will not come.
    pub(super) fn chunk_ended(&mut self, chunk: &Chunk, result: Result<()>, now: Instant) {
        let moved = if result.is_ok() && chunk.service != Service::Digest { chunk.bytes } else { 0 };
        self.left_flight(chunk.transfer, chunk.bytes, moved);
        self.ended(chunk.transfer, result, now);
    }

    /// An operation of `len` bytes is no longer in flight, and has moved `moved` bytes.
    fn left_flight(&mut self, id: TransferId, len: u64, moved: u64) {
        self.transfers.operations = self.transfers.operations.saturating_sub(1);
        self.transfers.bytes = self.transfers.bytes.saturating_sub(len);
        let Some(transfer) = self.transfers.table.get_mut(&id) else { return };
        transfer.in_flight = transfer.in_flight.saturating_sub(1);
        transfer.bytes += moved;
        if let Ok(peer) = self.peers.get_mut(transfer.peer) {
            peer.operations = peer.operations.saturating_sub(1);
            peer.bytes = peer.bytes.saturating_sub(len);
        }
    }

    fn ended(&mut self, id: TransferId, result: Result<()>, now: Instant) {
        match result {
            Ok(()) => self.settle(id, now),
            Err(error) => self.stop(id, error, now),
        }
    }

    /// Ends a transfer if it is over.
    fn settle(&mut self, id: TransferId, now: Instant) {
        let Some(transfer) = self.transfers.table.get_mut(&id) else { return };
        if transfer.in_flight > 0 || (transfer.stopped.is_none() && transfer.next.is_some()) {
            return;
        }
        // A write is over when the peer's memory holds it, or certainly is not written any more.
        if transfer.unflushed {
            transfer.unflushed = false;
            if let Ok(peer) = self.peers.get(transfer.peer) {
                let token = self.operations.insert(InFlight::Flush { transfer: id });
                match peer.endpoint.flush(token) {
                    Ok(Posted::Pending) => {
                        transfer.in_flight += 1;
                        return;
                    }
                    Ok(Posted::Done) => drop(self.operations.remove(token)),
                    Err(e) => {
                        self.operations.remove(token);
                        transfer.stopped.get_or_insert_with(|| ucx_error(e));
                    }
                }
            }
        }
        if transfer.proof == Proof::Due && transfer.stopped.is_none() {
            transfer.proof = Proof::Asking;
            transfer.expander = transfer.expander.plan().clone().expand(CHUNK_BYTES);
            transfer.next = transfer.expander.next();
            if transfer.next.is_some() {
                self.transfers.queues.entry(transfer.peer).or_default().push_back(id);
                return;
            }
        }
        self.finish(id, now);
    }

    fn finish(&mut self, id: TransferId, now: Instant) {
        let Some(transfer) = self.transfers.table.remove(&id) else { return };
        if let Some(at) = transfer.grace {
            self.transfers.graces.remove(&(at, id));
        }
        self.shared.live().transfers.remove(&id);
        match (&transfer.stopped, transfer.direction) {
            (Some(_), _) => self.stats.transfers_failed += 1,
            (None, _) => self.stats.transfers_done += 1,
        }
        match transfer.direction {
            Direction::Read => self.stats.bytes_read += transfer.bytes,
            Direction::Write => self.stats.bytes_written += transfer.bytes,
        }
        self.events.push_back(Event::TransferDone {
            id,
            peer: transfer.peer,
            result: transfer.stopped.map_or(Ok(()), Err),
            bytes: transfer.bytes,
            operations: transfer.posted,
            posted_at: transfer.posted_at.unwrap_or(now),
            finished_at: now,
        });
        self.registry.leave(&transfer.regions);
    }

    /// Posts nothing more for a transfer; the first reason counts.
    pub(super) fn stop(&mut self, id: TransferId, error: Error, now: Instant) {
        let Some(transfer) = self.transfers.table.get_mut(&id) else { return };
        if transfer.stopped.is_none() {
            transfer.stopped = Some(error);
            transfer.next = None;
            if let Some(at) = now.checked_add(self.config.cancel_grace) {
                transfer.grace = Some(at);
                self.transfers.graces.insert((at, id));
            }
        }
        self.settle(id, now);
    }

    pub(super) fn cancel(&mut self, id: TransferId, now: Instant) -> Result<()> {
        if !self.transfers.table.contains_key(&id) {
            return Err(id.unknown());
        }
        self.stop(id, Error::new(ErrorKind::Cancelled, "the transfer was cancelled"), now);
        Ok(())
    }

    /// Stops the transfers that use a local region.
    pub(super) fn cancel_users(&mut self, region: u32, now: Instant) {
        let uses = |transfer: &Transfer| transfer.regions.contains(&region);
        self.stop_where(uses, &Error::new(ErrorKind::Cancelled, "a region that it uses was deregistered"), now);
    }

    /// Stops the transfers with a peer.
    pub(super) fn stop_transfers_of(&mut self, peer: PeerId, error: &Error, now: Instant) {
        self.transfers.queues.remove(&peer);
        self.stop_where(|transfer| transfer.peer == peer, error, now);
    }

    fn stop_where(&mut self, which: impl Fn(&Transfer) -> bool, error: &Error, now: Instant) {
        let ids: Vec<TransferId> = self.transfers.table.iter().filter(|(_, t)| which(t)).map(|(id, _)| *id).collect();
        for id in ids {
            self.stop(id, error.clone(), now);
        }
    }

    /// Closes by force the connections of stopped transfers whose operations did not end by themselves.
    pub(super) fn check_graces(&mut self, now: Instant) {
        while let Some((at, id)) = self.transfers.graces.first().copied().filter(|(at, _)| *at <= now) {
            self.transfers.graces.remove(&(at, id));
            let Some(transfer) = self.transfers.table.get_mut(&id) else { continue };
            transfer.grace = None;
            let (peer, left) = (transfer.peer, transfer.in_flight);
            let error = Error::new(
                ErrorKind::PeerDied,
                format!(
                    "{left} operations of a stopped transfer did not end within {:?}, so the connection was closed; \
                     connect again",
                    self.config.cancel_grace
                ),
            );
            self.lose(peer, error, now);
        }
    }

    /// Ends the transfers that UCX has not given up in the time that a shutdown had. Their memory is not safe, as
    /// their results say.
    pub(super) fn abandon_transfers(&mut self, now: Instant) {
        for id in self.transfers.ids() {
            if let Some(transfer) = self.transfers.table.get_mut(&id) {
                transfer.stopped = Some(Error::new(
                    ErrorKind::Timeout,
                    "UCX had not given up the transfer's operations when the agent's shutdown ran out of time; they \
                     may still touch its memory, which must stay alive",
                ));
            }
            self.finish(id, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_takes_one_operation_of_any_size_and_then_what_fits() {
        let window = Window { operations: 2, bytes: 100 };
        assert!(fits(window, 0, 0, 1000));
        assert!(fits(window, 1, 60, 40));
        assert!(!fits(window, 1, 60, 41));
        assert!(!fits(window, 2, 2, 1));
        assert!(!fits(window, 1, u64::MAX, u64::MAX));
    }
}
