//! One load: its reads, what failed, and its figures.

use std::collections::BTreeMap;

use super::action::{TransferFigures, TransferToken};
use super::trace::{ReceiveTrace, ReceivedChunk};
use crate::ids::{EngineId, Incarnation, RequestId};
use crate::stats::Stats;
use crate::time::Time;
use crate::wire::{Blocks, Cause, Load, Prefill, RecvFailure, RecvRecord, Remote};

/// Where a load stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadPhase {
    /// No rank is connected yet, or the prefill is awaited; nothing but chunks of it is posted.
    Waiting,
    /// Transfers are under way, or ranks to read from still being connected to, or transfers winding down after a failure.
    Reading,
    /// Everything is read; the producer's verdicts are awaited.
    Confirming,
}

/// One rank's read.
#[derive(Debug)]
pub(super) struct RankRead {
    /// The transfers that may touch memory.
    pub(super) in_flight: Vec<TransferToken>,
    /// Up to which token it is posted in groups that keep all tokens.
    pub(super) up_to: u64,
    /// True if nothing is left to be posted.
    pub(super) whole: bool,
    /// True if the producer rank has judged it valid.
    pub(super) valid: bool,
}

/// One chunk of a prefill under way, read from one rank.
#[derive(Debug)]
struct ChunkRead {
    token: TransferToken,
    tokens: (u64, u64),
    figures: Option<TransferFigures>,
}

impl ChunkRead {
    fn trace(&self) -> Option<ReceivedChunk> {
        let TransferFigures { bytes, posted_at, finished_at, .. } = self.figures?;
        Some(ReceivedChunk { tokens: self.tokens, bytes, posted: posted_at, over: finished_at })
    }
}

#[derive(Debug)]
pub(super) struct LoadState {
    pub(super) load: Load,
    pub(super) phase: LoadPhase,
    /// By the connection that each goes over.
    pub(super) reads: BTreeMap<u64, RankRead>,
    /// The life of the engine whose prefill is awaited, and the lease that it has or will have, once they are known.
    pub(super) lease: Option<(Incarnation, u64)>,
    /// Reads of a lease that will never be granted, which may still touch memory.
    pub(super) revoked: Vec<TransferToken>,
    /// A chunk was not what the producer had: none is read any more before the prefill is over.
    pub(super) mismatched: bool,
    /// The first thing that went wrong.
    pub(super) failure: Option<(Cause, String)>,
    /// When the worker first heard of the request, by a hold or by this load, or of the end of the prefill that it awaited.
    known: Time,
    arrived: Time,
    /// When the reads from its first ranks were planned.
    planned: Option<Time>,
    posted: Option<Time>,
    all_posted: Option<Time>,
    first_end: Option<Time>,
    last_byte: Option<Time>,
    bytes: u64,
    operations: u64,
    chunks: Vec<ChunkRead>,
}

fn micros(from: Time, to: Time) -> u64 {
    u64::try_from(to.since(from).as_micros()).unwrap_or(u64::MAX)
}

impl LoadState {
    pub(super) fn new(now: Time, known: Time, load: Load) -> Self {
        LoadState {
            load,
            phase: LoadPhase::Waiting,
            reads: BTreeMap::new(),
            lease: None,
            revoked: Vec::new(),
            mismatched: false,
            failure: None,
            known,
            arrived: now,
            planned: None,
            posted: None,
            all_posted: None,
            first_end: None,
            last_byte: None,
            bytes: 0,
            operations: 0,
            chunks: Vec::new(),
        }
    }

    /// The prefill that was awaited is as far as this.
    pub(super) fn set_progress(&mut self, prefill: Prefill) {
        let Prefill { blocks, tokens, .. } = prefill;
        (self.load.remote_blocks, self.load.remote_tokens) = (blocks, tokens);
    }

    /// The prefill that was awaited is over. What was before that is none of the hand-over's time.
    pub(super) fn prefill_ended(&mut self, now: Time, prefill: Prefill) {
        self.set_progress(prefill);
        self.load.awaits = false;
        (self.known, self.arrived) = (now, now);
    }

    /// The blocks that were read are given away: nothing of them counts. Gives the reads that are still under way.
    pub(super) fn restart(&mut self) -> Vec<TransferToken> {
        let in_flight: Vec<TransferToken> =
            std::mem::take(&mut self.reads).into_values().flat_map(|read| read.in_flight).collect();
        self.revoked.extend(&in_flight);
        (self.bytes, self.operations) = (0, 0);
        [self.posted, self.all_posted, self.first_end, self.last_byte] = [None; 4];
        self.chunks.clear();
        self.mismatched = false;
        in_flight
    }

    /// The read that goes over this connection.
    pub(super) fn read_from(&mut self, connection: u64) -> &mut RankRead {
        let up_to = self.load.tokens.0;
        let new = || RankRead { in_flight: Vec::new(), up_to, whole: false, valid: false };
        self.reads.entry(connection).or_insert_with(new)
    }

    /// Takes note of a chunk that is posted.
    pub(super) fn add_chunk(&mut self, token: TransferToken, tokens: (u64, u64)) {
        self.chunks.push(ChunkRead { token, tokens, figures: None });
    }

    /// A chunk was not what the producer had. Gives its tokens.
    pub(super) fn digest_mismatch(&mut self, token: TransferToken) -> Option<(u64, u64)> {
        self.mismatched = true;
        let at = self.chunks.iter().rposition(|chunk| chunk.token == token)?;
        Some(self.chunks.remove(at).tokens)
    }

    /// Transfers that may still touch memory.
    pub(super) fn in_flight(&self) -> impl Iterator<Item = TransferToken> {
        self.reads.values().flat_map(|read| &read.in_flight).chain(&self.revoked).copied()
    }

    /// Takes note of a completed transfer. Gives whether it counts.
    pub(super) fn completed(&mut self, token: TransferToken, figures: Option<TransferFigures>) -> bool {
        if let Some(at) = self.revoked.iter().position(|revoked| *revoked == token) {
            self.revoked.swap_remove(at);
            return false;
        }
        for read in self.reads.values_mut() {
            read.in_flight.retain(|other| *other != token);
        }
        if let Some(figures) = figures {
            self.count_in(token, figures);
        }
        true
    }

    fn count_in(&mut self, token: TransferToken, figures: TransferFigures) {
        if let Some(chunk) = self.chunks.iter_mut().rfind(|chunk| chunk.token == token) {
            chunk.figures = Some(figures);
        }
        self.bytes = self.bytes.saturating_add(figures.bytes);
        self.operations = self.operations.saturating_add(figures.operations);
        self.posted = Some(self.posted.map_or(figures.posted_at, |t| t.min(figures.posted_at)));
        self.all_posted = Some(self.all_posted.map_or(figures.all_posted_at, |t| t.max(figures.all_posted_at)));
        self.first_end = Some(self.first_end.map_or(figures.finished_at, |t| t.min(figures.finished_at)));
        self.last_byte = Some(self.last_byte.map_or(figures.finished_at, |t| t.max(figures.finished_at)));
    }

    /// The local blocks that are to be filled, of all groups.
    fn blocks(&self) -> impl Iterator<Item = u32> {
        let null = self.load.null_block;
        self.load.local_blocks.iter().flat_map(Blocks::ids).copied().filter(move |id| null != Some(*id))
    }

    /// A time, if it is there. What was read while the prefill was under way took none of the hand-over's time.
    fn since_arrival(&self, at: Option<Time>) -> Option<Time> {
        at.map(|at| at.max(self.arrived))
    }

    /// The figures of a load that is over at `now`. Phases that it did not reach count as zero.
    pub(super) fn record(&self, now: Time, request: &RequestId, remote: &Remote) -> RecvRecord {
        let posted = self.since_arrival(self.posted).unwrap_or(now);
        let last_byte = self.since_arrival(self.last_byte).unwrap_or(now);
        RecvRecord {
            request: request.clone(),
            remote_request: remote.request.clone(),
            blocks: self.blocks().count() as u64,
            bytes: self.bytes,
            operations: self.operations,
            queued_us: micros(self.arrived, posted),
            first_us: micros(posted, self.since_arrival(self.first_end).unwrap_or(last_byte)),
            transfer_us: micros(posted, last_byte),
            confirm_us: micros(last_byte, now),
            cause: self.failure.as_ref().map(|(cause, _)| *cause),
        }
    }

    /// Notes that the reads are planned.
    pub(super) fn planned(&mut self, now: Time) {
        self.planned = Some(now);
    }

    /// Counts a load that is over at `now`, with its record.
    pub(super) fn count(&self, now: Time, record: &RecvRecord, stats: &mut Stats) {
        if let Some(cause) = record.cause {
            let failures = stats.recv_failures.entry(cause).or_default();
            *failures = failures.saturating_add(1);
            return;
        }
        stats.recvs += 1;
        stats.bytes += record.bytes;
        let chunks = self.chunks.iter().filter_map(|chunk| chunk.figures);
        stats.ahead_bytes += chunks.map(|figures| figures.bytes).sum::<u64>();
        stats.blocks += record.blocks;
        stats.operations += record.operations;
        stats.recv_bytes.observe(record.bytes);
        stats.handover_time.observe(micros(self.known, now));
        stats.queued_time.observe(record.queued_us);
        // A load whose blocks hold nothing of this rank's posts nothing.
        // Nor does one of which all was read while its prefill was under way.
        let all_posted = self.all_posted.filter(|at| *at >= self.arrived);
        if let (Some(posted), Some(all)) = (self.since_arrival(self.posted), all_posted) {
            stats.posting_time.observe(micros(posted, all));
            stats.transfer_time.observe(record.transfer_us);
        }
        stats.confirm_time.observe(record.confirm_us);
    }

    /// The life of a load that is over at `now`, with its record.
    pub(super) fn trace(
        &self,
        now: Time,
        engine: &EngineId,
        handshake: Option<(Time, Option<Time>)>,
        record: &RecvRecord,
    ) -> ReceiveTrace {
        ReceiveTrace {
            engine: engine.clone(),
            known: self.known,
            queued: self.arrived,
            handshake,
            planned: self.planned,
            posted: self.since_arrival(self.posted),
            all_posted: self.since_arrival(self.all_posted),
            last_byte: self.since_arrival(self.last_byte),
            over: now,
            confirmed: record.cause.is_none().then_some(now),
            record: record.clone(),
            message: self.failure.as_ref().map(|(_, text)| text.clone()),
            chunks: self.chunks.iter().filter_map(ChunkRead::trace).collect(),
        }
    }

    /// The failure as reported: every local block of every group is suspect, whichever rank failed.
    pub(super) fn recv_failure(&self, request: &RequestId) -> Option<RecvFailure> {
        let (cause, message) = self.failure.as_ref()?;
        let mut invalid: Vec<u32> = self.blocks().collect();
        invalid.sort_unstable();
        invalid.dedup();
        Some(RecvFailure {
            request: request.clone(),
            cause: *cause,
            message: message.clone(),
            invalid_blocks: invalid.into(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn times_span_the_transfers_of_all_ranks() {
        let name = |name: &str| RequestId::new(name).unwrap();
        let remote = Remote {
            engine: EngineId::new("p").unwrap(),
            incarnation: None,
            request: name("p-a"),
            host: "h".into(),
            port: 1,
            lease_ms: 1,
            lease_id: 1,
            shared: false,
        };
        let load = Load {
            request: name("a"),
            remote: remote.clone(),
            local_blocks: vec![],
            remote_blocks: vec![],
            tokens: (0, 0),
            remote_tokens: 0,
            null_block: None,
            awaits: false,
            window_only: false,
            refused: None,
        };
        let mut state = LoadState::new(Time(10), Time(5), load);
        let figures = |posted_at, all_posted_at, finished_at| {
            let [posted_at, all_posted_at, finished_at] = [posted_at, all_posted_at, finished_at].map(Time);
            Some(TransferFigures { bytes: 8, operations: 1, posted_at, all_posted_at, finished_at })
        };
        state.completed(TransferToken(1), figures(30, 35, 90));
        state.completed(TransferToken(2), figures(32, 40, 70));
        // One that was cancelled has none.
        state.completed(TransferToken(3), None);
        let record = state.record(Time(100), &name("a"), &remote);
        assert_eq!((record.bytes, record.operations), (16, 2));
        assert_eq!((record.queued_us, record.first_us, record.transfer_us, record.confirm_us), (20, 40, 60, 10));
    }
}
