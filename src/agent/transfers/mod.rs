//! Transfers: validated, expanded and posted in a window, ended exactly once.
//!
//! A transfer is *stopped* when it is cancelled, when one of its operations fails, or when its peer is lost: nothing
//! more is posted for it. It is *over* when in addition none of its operations is in flight. Only then is its event
//! made and its hold on the registered regions given up.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::agent::core::config::Window;
use crate::agent::core::event::{Direction, Event};
use crate::agent::core::ids::{PeerId, TransferId};
use crate::agent::core::in_flight::InFlight;
use crate::agent::core::limits::CHUNK_BYTES;
use crate::agent::core::limits::STREAM_BYTES;
use crate::agent::engine::Engine;
use crate::agent::paths::copy_pool::Copied;
use crate::agent::paths::{self, Profile};
use crate::agent::rpc::client::{Chunk, Service};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::ucx_error;
use crate::proto::plan::{CopyPlan, Expander, Operation};
use crate::ucx::{Completion, Posted};

/// How long a round of posting may last: copying happens during it, and messages, new commands and timers wait for it.
const TURN_TIME: Duration = Duration::from_micros(100);

pub(crate) struct Transfer {
    peer: PeerId,
    direction: Direction,
    expander: Expander,
    /// Whether it had no turn yet.
    fresh: bool,
    /// The operation to post next; `None` when all are posted, and before the first turn.
    next: Option<Operation>,
    /// Local regions that it uses, each once.
    regions: Vec<u32>,
    pub(crate) in_flight: u32,
    posted: u64,
    /// Bytes moved.
    pub(crate) bytes: u64,
    posted_at: Option<Instant>,
    all_posted_at: Option<Instant>,
    /// Why it was stopped, if it was.
    stopped: Option<Error>,
    /// When its operations must have ended after it was stopped.
    grace: Option<Instant>,
    /// One-sided writes were posted that no flush covers yet.
    pub(crate) unflushed: bool,
    /// Whether its runs are so short that messages carry them better than an operation each.
    gathered: bool,
    /// Whether a stream is worth having for it.
    streamable: bool,
    /// What is left to do to prove that the right bytes came.
    proof: Proof,
}

/// See [`AgentConfig::verify`](crate::agent::AgentConfig::verify).
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

    /// Whether a stream is worth having for it.
    pub(crate) fn is_streamable(&self) -> bool {
        self.streamable
    }

    /// Whether its runs are so short that messages carry them better than an operation each.
    pub(crate) fn is_gathered(&self) -> bool {
        self.gathered
    }

    /// Whether the bytes are there and their digests are being asked for.
    pub(crate) fn is_asking(&self) -> bool {
        self.proof == Proof::Asking
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
        self.expander.order();
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

    /// Takes the next operation, or at most `most` bytes of it.
    pub(crate) fn take(&mut self, most: u64) -> Option<Operation> {
        let operation = self.next?;
        let len = operation.len.min(most);
        self.next = match operation.len - len {
            0 => self.expander.next(),
            left => Some(Operation {
                local_offset: operation.local_offset + len,
                remote_offset: operation.remote_offset + len,
                len: left,
                ..operation
            }),
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
}

/// All transfers that are not over.
#[derive(Default)]
pub(crate) struct Transfers {
    table: HashMap<TransferId, Transfer>,
    /// Per peer, those that have something to post, in the order of their turns.
    queues: BTreeMap<PeerId, VecDeque<TransferId>>,
    /// Ends of grace.
    graces: BTreeSet<(Instant, TransferId)>,
    /// The peer whose turn was the last before the time was up.
    last_turn: Option<PeerId>,
    operations: u64,
    bytes: u64,
}

impl Transfers {
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn get(&self, id: TransferId) -> Option<&Transfer> {
        self.table.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: TransferId) -> Option<&mut Transfer> {
        self.table.get_mut(&id)
    }

    /// Operations in flight and their bytes.
    pub(crate) fn in_flight(&self) -> (u64, u64) {
        (self.operations, self.bytes)
    }

    pub(crate) fn ids(&self) -> Vec<TransferId> {
        self.table.keys().copied().collect()
    }

    /// The next end of a grace.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.graces.first().map(|(at, _)| *at)
    }
}

/// Whether an operation of `len` bytes may join what is in flight.
fn fits(window: Window, operations: u64, bytes: u64, len: u64) -> bool {
    operations == 0 || (operations < u64::from(window.operations) && bytes.saturating_add(len) <= window.bytes)
}

impl Engine {
    /// Takes a transfer up. On an error nothing was.
    pub(crate) fn start_transfer(
        &mut self,
        id: TransferId,
        peer: PeerId,
        direction: Direction,
        plan: CopyPlan,
        now: Instant,
    ) -> Result<()> {
        self.check_open()?;
        self.peers.get_mut(peer)?.find_neighbour(&self.address);
        let remote = self.peers.get(peer)?;
        let (mut locals, mut remotes) = (BTreeSet::new(), BTreeSet::new());
        for segment in plan.segments.iter() {
            if locals.insert(segment.local_region) {
                self.regions.live_range(segment.local_region)?;
            }
            if remotes.insert(segment.remote_region) {
                remote.check_region(segment.remote_region)?;
            }
        }
        plan.check(self.regions.lens(), remote.lens())?;
        let bytes = plan.bytes();
        let regions: Vec<u32> = locals.into_iter().collect();
        self.regions.enter(&regions);
        let transfer = Transfer {
            peer,
            direction,
            expander: plan.expand(self.config.max_operation_bytes),
            fresh: bytes > 0,
            next: None,
            regions,
            in_flight: 0,
            posted: 0,
            bytes: 0,
            posted_at: None,
            all_posted_at: None,
            stopped: None,
            grace: None,
            unflushed: false,
            gathered: false,
            streamable: direction == Direction::Read && bytes >= STREAM_BYTES,
            proof: if self.config.verify && direction == Direction::Read { Proof::Due } else { Proof::No },
        };
        if transfer.has_more() {
            // A new one goes first, once: so a small one does not wait for the turns of large ones (as "new flows" in
            // fq_codel, RFC 8290). After that they take turns.
            self.transfers.queues.entry(peer).or_default().push_front(id);
        }
        self.transfers.table.insert(id, transfer);
        self.settle(id, now);
        Ok(())
    }

    /// Ends a transfer that could not be taken up.
    pub(crate) fn refuse_transfer(&mut self, id: TransferId, peer: PeerId, error: Error, now: Instant) {
        self.stats.transfers_failed += 1;
        self.shared.live.lock().transfers.remove(&id);
        self.events.push_back(Event::TransferDone {
            id,
            peer,
            result: Err(error),
            bytes: 0,
            operations: 0,
            posted_at: now,
            all_posted_at: now,
            finished_at: now,
        });
    }

    /// Posts what the windows allow, in turns. Returns whether anything was posted.
    pub(crate) fn post_transfers(&mut self) -> bool {
        if self.transfers.queues.is_empty() {
            return self.copy_what_waits();
        }
        let end = Instant::now() + TURN_TIME;
        let mut any = false;
        loop {
            let mut progressed = false;
            // Few: the peers that have something to post. Where the last round was cut off, this one begins.
            let mut peers: Vec<PeerId> = self.transfers.queues.keys().copied().collect();
            let begin = peers.partition_point(|peer| Some(*peer) <= self.transfers.last_turn);
            peers.rotate_left(begin);
            for peer in peers {
                let posted = self.post_turn(peer);
                progressed |= posted;
                if posted && Instant::now() >= end {
                    self.transfers.last_turn = Some(peer);
                    return true;
                }
            }
            any |= progressed;
            if !progressed {
                return any || self.copy_what_waits();
            }
        }
    }

    /// Copies what no copy thread has begun. Returns whether there was anything.
    fn copy_what_waits(&mut self) -> bool {
        let Some(job) = self.copy_pool.take_back() else { return false };
        self.copied_batch(job.run(), Instant::now());
        true
    }

    /// Gives the first transfer in a peer's queue its turn. Returns whether anything was posted.
    fn post_turn(&mut self, peer_id: PeerId) -> bool {
        let Some(queue) = self.transfers.queues.get_mut(&peer_id) else { return false };
        let Ok(peer) = self.peers.get(peer_id) else { return false };
        if !peer.is_ready() {
            return false;
        }
        // Those that were stopped or are gone have lost their place.
        let table = &mut self.transfers.table;
        let live = |id: &TransferId| table.get(id).is_some_and(|t| t.stopped.is_none() && t.has_more());
        while queue.front().is_some_and(|id| !live(id)) {
            queue.pop_front();
        }
        if let Some(transfer) = queue.front().and_then(|id| table.get_mut(id)) {
            transfer.prepare(self.config.gather_below);
        }
        let next = queue.pop_front().and_then(|id| Some((id, Profile::of(&self.regions, peer, table.get(&id)?)?)));
        let Some((id, profile)) = next else {
            self.transfers.queues.remove(&peer_id);
            return false;
        };
        let path = paths::choose(peer, profile);
        let posted = path.post(self, peer_id, id, profile);
        if let (Ok(bytes), false) = (&posted, profile.digest) {
            *path.counter(&mut self.stats) += bytes;
        }
        let more = self.transfers.get(id).is_some_and(Transfer::has_more);
        if let Some(queue) = self.transfers.queues.get_mut(&peer_id) {
            match posted {
                // It keeps its turn if the windows had no room for any of it.
                Ok(0) if more => queue.push_front(id),
                Ok(_) if more => queue.push_back(id),
                _ => {}
            }
            if queue.is_empty() {
                self.transfers.queues.remove(&peer_id);
            }
        }
        let now = Instant::now();
        match posted {
            Ok(bytes) => {
                self.settle(id, now);
                bytes > 0
            }
            Err(error) if error.kind() == ErrorKind::PeerDied => {
                self.lose(peer_id, error, now);
                true
            }
            Err(error) => {
                self.stop(id, error, now);
                true
            }
        }
    }

    /// Whether the windows have room for an operation of `len` bytes to this peer.
    pub(crate) fn has_room(&self, peer: PeerId, len: u64) -> bool {
        let (operations, bytes) = self.transfers.in_flight();
        fits(self.config.total_window, operations, bytes, len)
            && self
                .peers
                .get(peer)
                .is_ok_and(|peer| fits(self.config.peer_window, peer.operations.into(), peer.bytes, len))
    }

    /// An operation of `len` bytes is in flight.
    pub(crate) fn entered_flight(&mut self, peer: PeerId, len: u64) {
        self.transfers.operations += 1;
        self.transfers.bytes += len;
        if let Ok(peer) = self.peers.get_mut(peer) {
            peer.operations += 1;
            peer.bytes += len;
        }
    }

    /// Takes the operations that UCX has ended.
    pub(crate) fn reap_completions(&mut self, now: Instant) {
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
                Some(InFlight::Service { peer, held, regions }) => {
                    self.regions.leave(&regions);
                    self.service_ended(peer, held, result.map_err(ucx_error), now);
                }
                Some(InFlight::Goodbye) => {}
                Some(InFlight::CloseFlush) => self.left(token),
                None => log::error!("agent {}: UCX ended an unknown operation", self.config.name),
            }
        }
    }

    fn copied(&mut self, id: TransferId, len: u64, result: Result<()>, now: Instant) {
        self.left_flight(id, len, if result.is_ok() { len } else { 0 });
        self.ended(id, result, now);
    }

    /// Takes what the copy threads have done.
    pub(crate) fn reap_copies(&mut self, now: Instant) {
        for copied in self.copy_pool.reap() {
            self.copied_batch(copied, now);
        }
    }

    /// A batch was copied, or failed.
    pub(crate) fn copied_batch(&mut self, copied: Copied, now: Instant) {
        let Copied { transfer, peer, batch, is_filled_by_kernel, result } = copied;
        let len = batch.bytes() as u64;
        self.copy_pool.give_back(batch);
        let result = result.map_err(|error| match self.peers.get(peer) {
            Ok(peer) => error.context(format!("agent {}", peer.name)),
            Err(_) => error,
        });
        self.batch_left_flight(transfer, len, is_filled_by_kernel, result.is_ok());
        match result {
            // Its transfers are stopped with it.
            Err(error) if error.kind() == ErrorKind::PeerDied => {
                self.lose(peer, error.clone(), now);
                self.stop(transfer, error, now);
            }
            result => self.ended(transfer, result, now),
        }
    }

    /// The reply to a chunk came, or will not come.
    pub(crate) fn chunk_ended(&mut self, chunk: &Chunk, result: Result<()>, now: Instant) {
        let moved = if result.is_ok() && chunk.service != Service::Digest { chunk.bytes } else { 0 };
        self.left_flight(chunk.transfer, chunk.bytes, moved);
        self.ended(chunk.transfer, result, now);
    }

    /// A batch of `len` bytes is no longer with a copy thread; it was counted in the windows or not.
    fn batch_left_flight(&mut self, id: TransferId, len: u64, was_counted: bool, is_copied: bool) {
        let moved = if is_copied { len } else { 0 };
        if was_counted {
            return self.left_flight(id, len, moved);
        }
        let Some(transfer) = self.transfers.table.get_mut(&id) else { return };
        transfer.in_flight = transfer.in_flight.saturating_sub(1);
        transfer.bytes += moved;
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
        if transfer.in_flight > 0 || (transfer.stopped.is_none() && transfer.has_more()) {
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
        self.shared.live.lock().transfers.remove(&id);
        match (&transfer.stopped, transfer.direction) {
            (Some(_), _) => self.stats.transfers_failed += 1,
            (None, _) => self.stats.transfers_done += 1,
        }
        let posted_at = transfer.posted_at.unwrap_or(now);
        let all_posted_at = transfer.all_posted_at.unwrap_or(posted_at);
        if self.config.telemetry && transfer.stopped.is_none() && transfer.posted_at.is_some() {
            let micros = |to: Instant| u64::try_from((to - posted_at).as_micros()).unwrap_or(u64::MAX);
            self.stats.posting_time.observe(micros(all_posted_at));
            self.stats.transfer_time.observe(micros(now));
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
            posted_at,
            all_posted_at,
            finished_at: now,
        });
        self.regions.leave(&transfer.regions);
    }

    /// Posts nothing more for a transfer; the first reason counts.
    pub(crate) fn stop(&mut self, id: TransferId, error: Error, now: Instant) {
        let Some(transfer) = self.transfers.table.get_mut(&id) else { return };
        if transfer.stopped.is_none() {
            transfer.stopped = Some(error);
            (transfer.fresh, transfer.next) = (false, None);
            if let Some(at) = now.checked_add(self.config.cancel_grace) {
                transfer.grace = Some(at);
                self.transfers.graces.insert((at, id));
            }
            for job in self.copy_pool.withdraw(id) {
                self.batch_left_flight(id, job.batch.bytes() as u64, job.is_filled_by_kernel, false);
                self.copy_pool.give_back(job.batch);
            }
        }
        self.settle(id, now);
    }

    pub(crate) fn cancel(&mut self, id: TransferId, now: Instant) -> Result<()> {
        if !self.transfers.table.contains_key(&id) {
            return Err(id.unknown());
        }
        self.stop(id, Error::new(ErrorKind::Cancelled, "the transfer was cancelled"), now);
        Ok(())
    }

    /// Stops the transfers that use a local region.
    pub(crate) fn cancel_users(&mut self, region: u32, now: Instant) {
        let uses = |transfer: &Transfer| transfer.regions.contains(&region);
        self.stop_where(uses, &Error::new(ErrorKind::Cancelled, "a region that it uses was deregistered"), now);
    }

    /// Stops the transfers with a peer.
    pub(crate) fn stop_transfers_of(&mut self, peer: PeerId, error: &Error, now: Instant) {
        self.transfers.queues.remove(&peer);
        self.stop_where(|transfer| transfer.peer == peer, error, now);
    }

    fn stop_where(&mut self, which: impl Fn(&Transfer) -> bool, error: &Error, now: Instant) {
        let ids: Vec<TransferId> = self.transfers.table.iter().filter(|(_, t)| which(t)).map(|(id, _)| *id).collect();
        for id in ids {
            self.stop(id, error.clone(), now);
        }
    }

    /// Loses the peers that have not taken what they read of regions that are being deregistered.
    pub(crate) fn check_borrowers(&mut self, now: Instant) {
        for region in self.regions.take_overdue(now) {
            let borrowers: BTreeSet<PeerId> =
                self.streams.borrowers(region).chain(self.operations.borrowers(region)).collect();
            for peer in borrowers {
                let grace = self.config.cancel_grace;
                let error = Error::new(
                    ErrorKind::PeerDied,
                    format!(
                        "the peer had not taken what it reads of region {region} {grace:?} after its deregistration began, \
                         so the connection was closed; connect again"
                    ),
                );
                self.lose(peer, error, now);
            }
        }
    }

    /// Closes by force the connections of stopped transfers whose operations did not end by themselves.
    pub(crate) fn check_graces(&mut self, now: Instant) {
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
    pub(crate) fn abandon_transfers(&mut self, now: Instant) {
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
