//! Transfers: validated, expanded, taken in turns, ended exactly once.
//!
//! A transfer is *stopped* when it is cancelled, when one of its operations fails, or when its peer is lost: nothing
//! more is posted for it. It is *over* when in addition none of its operations is in flight. Only then is that told, by
//! [`Effect::TransferEnded`], and its hold on the registered regions given up.

mod queues;
mod window;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use self::queues::Queues;
pub(crate) use self::window::{Lack, Load, Windows};
use super::core::config::AgentConfig;
use super::core::effect::{Effect, Effects, OperationEnd, TransferEnd};
use super::core::event::Direction;
use super::core::id_map::IdMap;
use super::core::ids::{PeerId, TransferId};
use super::core::limits::{CHUNK_BYTES, MAX_LIGHT};
use super::core::regions::{Hold, Regions};
use super::core::request::{TransferRequest, is_light};
use super::peers::Peer;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::ids::Incarnation;
use crate::proto::plan::{Expander, Operation, Segment, SegmentBlocks};
use crate::proto::wire::MemoryKind;

pub(crate) struct Transfer {
    user_data: u64,
    /// The message that goes to the peer at its end, if it succeeds.
    message: Option<Vec<u8>>,
    peer: PeerId,
    /// The peer's life: its regions are the same over all connections.
    owner: Incarnation,
    direction: Direction,
    expander: Expander,
    /// Whether it had no turn yet.
    fresh: bool,
    /// Whether its blocks are to be put in the order of the peer's memory.
    is_ordered: bool,
    /// The operation to post next; `None` when all are posted, and before the first turn.
    next: Option<Operation>,
    /// Operations to post again, by another path, after all others.
    again: Vec<Operation>,
    /// Local regions that it uses, each once.
    holds: Vec<Hold>,
    /// Regions of the peer's, likewise.
    remote_regions: Vec<u32>,
    in_flight: u32,
    posted: u64,
    /// Bytes moved.
    bytes: u64,
    posted_at: Option<Instant>,
    all_posted_at: Option<Instant>,
    /// Why it was stopped, if it was.
    stopped: Option<Error>,
    /// When its operations must have ended after it was stopped.
    grace: Option<Instant>,
    /// One-sided writes were posted that no flush covers yet.
    unflushed: bool,
    /// Bytes came to device memory one-sided, and have not been flushed.
    fills_device: bool,
    /// Whether its runs are so short that messages carry them better than an operation each.
    gathered: bool,
    /// Whether it takes some microseconds at most.
    is_light: bool,
    /// The proof that the right bytes came.
    proof: Proof,
}

/// See [`AgentConfig::verify`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    /// Nothing.
    No,
    /// The peer's digests are to be asked for when all bytes are there.
    Due,
    /// They are being asked for.
    Asking,
}

impl Transfer {
    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    /// Whether its runs are so short that messages carry them better than an operation each.
    pub(crate) fn is_gathered(&self) -> bool {
        self.gathered
    }

    /// Whether the bytes are there and their digests are being asked for.
    pub(crate) fn is_asking(&self) -> bool {
        self.proof == Proof::Asking
    }

    /// Whether it reads or writes an agent's region.
    fn reaches(&self, owner: Incarnation, region: u32) -> bool {
        self.owner == owner && self.remote_regions.binary_search(&region).is_ok()
    }

    /// Whether there is something to post.
    fn has_more(&self) -> bool {
        self.fresh || self.next.is_some()
    }

    /// Does before the first turn what takes time for each block. When it started, the next command may have been waiting.
    fn prepare(&mut self, gather_below: u64) {
        if !self.fresh {
            return;
        }
        self.fresh = false;
        if self.is_ordered {
            self.expander.order();
        }
        let plan = self.expander.plan();
        // Counting runs is saved where none can be short.
        self.gathered = plan.segments.iter().any(|segment| segment.len < gather_below)
            && plan.mean_run().is_some_and(|run| run < gather_below);
        self.next = self.expander.next();
    }

    /// The operation to post next.
    pub(crate) fn next(&self) -> Option<Operation> {
        self.next
    }

    /// The blocks of the next operation and of all that follow in its segment, see [`Expander::blocks`].
    pub(crate) fn blocks(&self) -> Option<SegmentBlocks<'_>> {
        self.expander.blocks()
    }

    /// Takes the first `count` of these blocks.
    pub(crate) fn take_blocks(&mut self, count: usize) {
        self.expander.take_blocks(count);
        self.next = self.expander.next().or_else(|| self.again.pop());
    }

    /// Takes the next operation, or at most `most` bytes of it.
    pub(crate) fn take(&mut self, most: u64) -> Option<Operation> {
        let operation = self.next?;
        let len = operation.len.min(most);
        self.next = match operation.len - len {
            0 => self.expander.next().or_else(|| self.again.pop()),
            left => {
                self.expander.split();
                Some(Operation {
                    local_offset: operation.local_offset + len,
                    remote_offset: operation.remote_offset + len,
                    len: left,
                    ..operation
                })
            }
        };
        Some(Operation { len, ..operation })
    }

    /// How long ago its first operation was posted.
    pub(crate) fn age(&self, now: Instant) -> Duration {
        self.posted_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at))
    }

    /// Notes that operations are being posted.
    pub(crate) fn begin(&mut self, operations: u64, now: Instant) {
        self.posted_at.get_or_insert(now);
        // Asking for digests comes after the bytes.
        if operations > 0 {
            self.all_posted_at = Some(now);
        }
        self.posted += operations;
    }

    /// An operation was posted that has yet to end.
    pub(crate) fn enter_flight(&mut self) {
        self.in_flight += 1;
    }

    /// Bytes were moved by an operation that was over when it was posted.
    pub(crate) fn add_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// A one-sided write was posted: the transfer is over only after a flush.
    pub(crate) fn needs_flush(&mut self) {
        self.unflushed = true;
    }

    /// A one-sided read to device memory was posted.
    pub(crate) fn fills_device(&mut self) {
        self.fills_device = true;
    }
}

/// All transfers that are not over.
pub(crate) struct Transfers {
    table: IdMap<TransferId, Transfer>,
    /// Those that have something to post.
    queues: Queues,
    /// How many turns have begun.
    #[cfg(test)]
    pub(crate) turns: u64,
    /// Ends of grace.
    graces: BTreeSet<(Instant, TransferId)>,
    windows: Windows,
    /// How long the operations of a stopped transfer may take to end by themselves.
    pub(crate) cancel_grace: Duration,
    max_operation_bytes: u64,
    gather_below: u64,
    verify: bool,
}

impl Transfers {
    pub(crate) fn new(config: &AgentConfig) -> Self {
        Transfers {
            table: IdMap::default(),
            queues: Queues::default(),
            #[cfg(test)]
            turns: 0,
            graces: BTreeSet::new(),
            windows: Windows::new(config.total_window(), config.peer_window),
            cancel_grace: config.cancel_grace,
            max_operation_bytes: config.max_operation_bytes,
            gather_below: config.gather_below,
            verify: config.verify,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// The load in flight of all of them.
    pub(crate) fn in_flight(&self) -> Load {
        self.windows.total()
    }

    /// A transfer, until it is over.
    pub(crate) fn get(&self, id: TransferId) -> Option<&Transfer> {
        self.table.get(&id)
    }

    /// Whether a transfer is one that was not stopped.
    pub(crate) fn is_going_on(&self, id: TransferId) -> bool {
        self.table.get(&id).is_some_and(|transfer| transfer.stopped.is_none())
    }

    /// A transfer and the windows that its operations count in.
    pub(crate) fn get_with_windows(&mut self, id: TransferId) -> Option<(&mut Transfer, &mut Windows)> {
        self.table.get_mut(&id).map(|transfer| (transfer, &mut self.windows))
    }

    /// The next end of a grace, or the time at which transfers that wait may get room.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let room = self.windows.deadline().filter(|_| self.queues.has_starved());
        self.graces.first().map(|(at, _)| *at).into_iter().chain(room).min()
    }

    /// Takes a transfer up. On an error nothing was.
    pub(crate) fn start(
        &mut self,
        request: TransferRequest,
        peer: &Peer,
        regions: &Regions,
        effects: &mut Effects,
    ) -> Result<()> {
        let TransferRequest { id, direction, plan, message, user_data, .. } = request;
        let mut holds = Vec::<Hold>::new();
        for Segment { local_region, .. } in plan.segments.iter() {
            // Most follow one of the same region.
            if holds.last().is_none_or(|last| last.region != *local_region) {
                regions.live_range(*local_region)?;
                holds.extend(regions.hold(*local_region, peer.id));
            }
        }
        holds.sort_unstable_by_key(|hold| hold.region);
        holds.dedup_by_key(|hold| hold.region);
        let mut remote_regions: Vec<u32> = plan.segments.iter().map(|segment| segment.remote_region).collect();
        remote_regions.sort_unstable();
        remote_regions.dedup();
        for region in &remote_regions {
            peer.check_region(*region)?;
        }
        plan.check(|region| regions.live_len(region), |region| peer.len_of(region))?;
        let bytes = plan.bytes();
        let is_light = is_light(&plan);
        let reaches_all = |hold: &Hold| match regions.range(hold.region).map(MemoryRange::kind) {
            Some(MemoryKind::Cuda { device }) => {
                remote_regions.iter().all(|region| peer.is_importable(*region, device))
            }
            _ => false,
        };
        let by_device = holds.iter().all(reaches_all);
        let transfer = Transfer {
            user_data,
            message,
            peer: peer.id,
            owner: peer.incarnation,
            direction,
            expander: plan.expand(self.max_operation_bytes),
            fresh: bytes > 0,
            // A device copies blocks in any order as fast, and faster than they are put in order.
            is_ordered: !by_device,
            next: None,
            again: Vec::new(),
            holds,
            remote_regions,
            in_flight: 0,
            posted: 0,
            bytes: 0,
            posted_at: None,
            all_posted_at: None,
            stopped: None,
            grace: None,
            unflushed: false,
            fills_device: false,
            gathered: false,
            is_light,
            proof: if self.verify && direction == Direction::Read { Proof::Due } else { Proof::No },
        };
        if transfer.has_more() {
            // A new one goes first, once: so a small one does not wait for the turns of large ones (as "new flows" in
            // fq_codel, RFC 8290). After that they take turns.
            self.queues.push_front(peer.id, id);
        }
        self.table.insert(id, transfer);
        self.settle(id, effects);
        Ok(())
    }

    /// Whether what was read is to be proved right.
    pub(crate) fn verifies(&self) -> bool {
        self.verify
    }

    /// Whether all that there are take some microseconds together.
    pub(crate) fn are_light(&self) -> bool {
        self.table.len() <= MAX_LIGHT && self.table.values().all(|transfer| transfer.is_light)
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.queues.is_empty()
    }

    /// Whether any peer with something to post may have room.
    pub(crate) fn have_next(&self) -> bool {
        self.queues.has_next(self.windows.may_have_room())
    }

    /// The peer whose turn it is to post, if any may have room. [`Transfers::begin_turn`] or [`Transfers::park`] follows.
    pub(crate) fn next_peer(&mut self) -> Option<PeerId> {
        self.queues.begin_turn(self.windows.may_have_room())
    }

    /// Nothing can be posted for the peer in turn until it is [woken](Transfers::wake).
    pub(crate) fn park(&mut self, peer: PeerId) {
        self.queues.park(peer);
    }

    /// Something has happened that may let a peer's transfers go on.
    pub(crate) fn wake(&mut self, peer: PeerId) {
        self.queues.wake(peer);
    }

    /// All peers that may have room had their turns.
    pub(crate) fn end_round(&mut self) {
        self.queues.end_round();
    }

    /// Takes the transfer whose turn it is out of a peer's queue; [`Transfers::end_turn`] puts it back.
    pub(crate) fn begin_turn(&mut self, peer: PeerId) -> Option<TransferId> {
        #[cfg(test)]
        {
            self.turns += 1;
        }
        // Those that were stopped or are gone have lost their place.
        while let Some(id) = self.queues.pop(peer) {
            let live = self.table.get_mut(&id).filter(|transfer| transfer.stopped.is_none() && transfer.has_more());
            if let Some(transfer) = live {
                transfer.prepare(self.gather_below);
                if transfer.next.is_some() {
                    return Some(id);
                }
            }
        }
        self.queues.remove(peer);
        None
    }

    /// Queues a transfer that has had its turn if there is more of it. It keeps its place if nothing of it was posted, for
    /// `lack` of room where that is why.
    pub(crate) fn end_turn(&mut self, peer: PeerId, id: TransferId, posted: &Result<u64>, lack: Option<Lack>) {
        let has_posted = !matches!(posted, Ok(0));
        if posted.is_ok() && self.table.get(&id).is_some_and(Transfer::has_more) {
            self.queues.put_back(peer, id, !has_posted);
        }
        if self.queues.end_turn(peer, has_posted, lack) {
            self.windows.is_full();
        }
    }

    /// Takes note of an operation that is no longer in flight. Returns the peer, if the transfer is known.
    pub(crate) fn operation_ended(&mut self, end: OperationEnd, effects: &mut Effects, now: Instant) -> Option<PeerId> {
        let OperationEnd { transfer: id, windowed, moved, result } = end;
        let transfer = self.table.get_mut(&id)?;
        let peer = transfer.peer;
        transfer.in_flight = transfer.in_flight.saturating_sub(1);
        transfer.bytes += moved.total();
        if let Some(len) = windowed {
            self.windows.leave(peer, len, now);
            self.queues.wake(peer);
        }
        match result {
            Ok(()) => self.settle(id, effects),
            Err(error) => self.stop(id, error, effects, now),
        }
        Some(peer)
    }

    /// Takes an operation back that has moved nothing, for another path to post it.
    pub(crate) fn take_back(&mut self, id: TransferId, operation: Operation, effects: &mut Effects, now: Instant) {
        let Some(transfer) = self.table.get_mut(&id) else { return };
        transfer.in_flight = transfer.in_flight.saturating_sub(1);
        self.windows.leave(transfer.peer, operation.len, now);
        if transfer.stopped.is_none() {
            if transfer.has_more() {
                transfer.again.push(operation);
            } else {
                transfer.next = Some(operation);
                self.queues.push_back(transfer.peer, id);
            }
        }
        self.queues.wake(transfer.peer);
        self.settle(id, effects);
    }

    /// Ends a transfer if it is over.
    pub(crate) fn settle(&mut self, id: TransferId, effects: &mut Effects) {
        let Some(transfer) = self.table.get_mut(&id) else { return };
        if transfer.in_flight > 0 || (transfer.stopped.is_none() && transfer.has_more()) {
            return;
        }
        // A write is over when the peer's memory holds it, or certainly is not written any more.
        if std::mem::take(&mut transfer.unflushed) {
            transfer.in_flight += 1;
            effects.push(Effect::Flush { transfer: id, peer: transfer.peer });
            return;
        }
        if std::mem::take(&mut transfer.fills_device) {
            transfer.in_flight += 1;
            effects.push(Effect::FlushDevice { transfer: id });
            return;
        }
        if transfer.proof == Proof::Due && transfer.stopped.is_none() {
            transfer.proof = Proof::Asking;
            transfer.expander = transfer.expander.plan().clone().expand(CHUNK_BYTES);
            transfer.next = transfer.expander.next();
            if transfer.next.is_some() {
                self.queues.push_back(transfer.peer, id);
                return;
            }
        }
        self.finish(id, effects);
    }

    fn finish(&mut self, id: TransferId, effects: &mut Effects) {
        let Some(transfer) = self.table.remove(&id) else { return };
        if let Some(at) = transfer.grace {
            self.graces.remove(&(at, id));
        }
        let posted = transfer.posted_at.map(|at| (at, transfer.all_posted_at.unwrap_or(at)));
        effects.push(Effect::TransferEnded(TransferEnd {
            id,
            user_data: transfer.user_data,
            message: transfer.message,
            peer: transfer.peer,
            direction: transfer.direction,
            result: transfer.stopped.map_or(Ok(()), Err),
            bytes: transfer.bytes,
            operations: transfer.posted,
            posted,
            remote_regions: transfer.remote_regions,
        }));
    }

    /// Posts nothing more for a transfer; the first reason counts.
    pub(crate) fn stop(&mut self, id: TransferId, error: Error, effects: &mut Effects, now: Instant) {
        let Some(transfer) = self.table.get_mut(&id) else { return };
        if transfer.stopped.is_none() {
            transfer.stopped = Some(error);
            (transfer.fresh, transfer.next) = (false, None);
            if let Some(at) = now.checked_add(self.cancel_grace) {
                transfer.grace = Some(at);
                self.graces.insert((at, id));
            }
            effects.push(Effect::TransferStopped { transfer: id });
            // There may be room for one behind it.
            self.queues.wake(transfer.peer);
        }
        self.settle(id, effects);
    }

    pub(crate) fn cancel(&mut self, id: TransferId, effects: &mut Effects, now: Instant) -> Result<()> {
        if !self.table.contains_key(&id) {
            return Err(id.unknown());
        }
        self.stop(id, Error::new(ErrorKind::Cancelled, "the transfer was cancelled"), effects, now);
        Ok(())
    }

    /// Stops the transfers that use a local region.
    pub(crate) fn stop_users_of(&mut self, region: u32, effects: &mut Effects, now: Instant) {
        let error = Error::new(ErrorKind::Cancelled, "a region that it uses was deregistered");
        self.stop_where(|transfer| transfer.holds.iter().any(|hold| hold.region == region), &error, effects, now);
    }

    /// Stops the transfers that read or write a region that its owner deregisters, those of earlier connections with it, and
    /// returns them.
    pub(crate) fn stop_users_there(
        &mut self,
        owner: Incarnation,
        region: u32,
        effects: &mut Effects,
        now: Instant,
    ) -> Vec<TransferId> {
        let error = Error::not_found(format!("the peer has deregistered its region {region}"));
        self.stop_where(|transfer| transfer.reaches(owner, region), &error, effects, now)
    }

    /// Tells whether any transfer over the connection to a peer reads or writes a region of it.
    pub(crate) fn uses(&self, peer: PeerId, region: u32) -> bool {
        self.table
            .values()
            .any(|transfer| transfer.peer == peer && transfer.remote_regions.binary_search(&region).is_ok())
    }

    /// Stops the transfers with a peer.
    pub(crate) fn stop_all_with(&mut self, peer: PeerId, error: &Error, effects: &mut Effects, now: Instant) {
        self.queues.remove(peer);
        self.stop_where(|transfer| transfer.peer == peer, error, effects, now);
    }

    /// Stops all transfers.
    pub(crate) fn stop_all(&mut self, error: &Error, effects: &mut Effects, now: Instant) {
        self.stop_where(|_| true, error, effects, now);
    }

    fn stop_where(
        &mut self,
        which: impl Fn(&Transfer) -> bool,
        error: &Error,
        effects: &mut Effects,
        now: Instant,
    ) -> Vec<TransferId> {
        let ids: Vec<TransferId> = self.table.iter().filter(|(_, t)| which(t)).map(|(id, _)| *id).collect();
        for id in &ids {
            self.stop(*id, error.clone(), effects, now);
        }
        ids
    }

    /// Makes room where peers stand still, and gives up the peers of stopped transfers whose operations did not end by
    /// themselves, which ends them.
    pub(crate) fn check_deadlines(&mut self, effects: &mut Effects, now: Instant) {
        self.windows.check(now);
        while let Some((at, id)) = self.graces.first().copied().filter(|(at, _)| *at <= now) {
            self.graces.remove(&(at, id));
            let Some(transfer) = self.table.get_mut(&id) else { continue };
            transfer.grace = None;
            let error = Error::new(
                ErrorKind::PeerDied,
                format!(
                    "{} operations of a stopped transfer did not end within {:?}, so the connection was closed; \
                     connect again",
                    transfer.in_flight, self.cancel_grace
                ),
            );
            effects.lose(transfer.peer, error);
        }
    }

    /// Ends the transfers that UCX has not given up in the time that a shutdown had. Their memory is not safe, as
    /// their results say.
    pub(crate) fn abandon(&mut self, effects: &mut Effects) {
        let ids: Vec<TransferId> = self.table.keys().copied().collect();
        for id in ids {
            if let Some(transfer) = self.table.get_mut(&id) {
                transfer.stopped = Some(Error::new(
                    ErrorKind::Timeout,
                    "UCX had not given up the transfer's operations when the agent's shutdown ran out of time; they \
                     may still touch its memory, which must stay alive",
                ));
            }
            self.finish(id, effects);
        }
    }
}
