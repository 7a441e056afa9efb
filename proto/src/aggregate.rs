//! Per-rank reports to the outcome per request.
//!
//! Each rank reports a request's send or receive once, whenever it is done with it. The request is over when every rank
//! that was expected to has reported; it failed if any of them says so. Which ranks those are is told at run time: by
//! default all of the engine's, per request and direction however many the plan's readers make it.

mod rank_set;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use self::rank_set::RankSet;
use super::ids::{RankId, RequestId};
use super::latest::Latest;
use super::stats::Stats;
use super::wire::limits::MAX_RANKS;
use super::wire::{self, Blocks, Cause, RecvRecord, ReportBatch, WorkerReport};
use crate::error::{Error, ErrorKind, Result};

/// Requests under way that are remembered by default, per direction.
pub const DEFAULT_LIMIT: usize = 1 << 16;
/// Completed requests that are remembered at most. A rank that repeats itself does so in one of its next reports, and each takes
/// some 200 bytes.
const MAX_COMPLETED: usize = 4096;

/// Which of a request's two sides a report is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestSide {
    /// The producer's blocks being read.
    Send,
    /// The consumer's blocks being filled.
    Recv,
}

/// A receive that failed on at least one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedRecv {
    /// The request.
    pub request: RequestId,
    /// The first failure that each failed rank reported, by rank.
    pub causes: Vec<(RankId, Cause, String)>,
    /// The blocks that any rank calls invalid, ascending.
    pub invalid_blocks: Blocks,
}

/// The requests that ended since the last poll. Each is in at most one outcome per side.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Prefills that can be read on every rank, for consumers that await them. In the order in which the last rank
    /// said so.
    pub granted: Vec<RequestId>,
    /// Sends over, in the order in which they ended.
    pub finished_sending: Vec<RequestId>,
    /// Receives over, in the order in which they ended, failed ones included.
    pub finished_recving: Vec<RequestId>,
    /// Those of `finished_recving` that failed.
    pub failed_recving: Vec<FailedRecv>,
    /// Figures of single ranks, in the order in which they came.
    pub records: Vec<(RankId, RecvRecord)>,
    /// All ranks' counters since the last poll.
    pub stats: Stats,
}

impl Outcome {
    /// True if there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.granted.is_empty()
            && self.finished_sending.is_empty()
            && self.finished_recving.is_empty()
            && self.failed_recving.is_empty()
            && self.records.is_empty()
            && self.stats.is_empty()
    }
}

/// A request under way in one direction.
#[derive(Debug, Clone, Default)]
struct PendingRequest {
    reported: RankSet,
    /// How many ranks must report; none means all.
    count: Option<u32>,
    failures: BTreeMap<RankId, (Cause, String)>,
    invalid: BTreeSet<u32>,
}

#[derive(Debug, Clone)]
struct SideState {
    pending: HashMap<RequestId, PendingRequest>,
    /// Completed requests, and the ranks that have reported them.
    done: Latest<RequestId, RankSet>,
}

/// Turns ranks' reports into outcomes. Reports may come in any order and grouping; a rank that repeats itself changes
/// nothing. Reports can only be told from their repetitions by the requests in them: statistics of a report without any
/// are added each time, those of a report in which every request is old news are not.
#[derive(Debug, Clone)]
pub struct Aggregator {
    ranks: Vec<RankId>,
    limit: usize,
    /// Grants of which some ranks have said that they have them.
    grant: SideState,
    send: SideState,
    recv: SideState,
    ready: Outcome,
}

impl Aggregator {
    /// An aggregator for an engine of `ranks` (repeats are dropped), remembering [`DEFAULT_LIMIT`] requests.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] without any rank, [`ErrorKind::Exhausted`] for more than [`MAX_RANKS`].
    pub fn new(ranks: impl IntoIterator<Item = RankId>) -> Result<Aggregator> {
        Self::with_limit(ranks, DEFAULT_LIMIT)
    }

    /// As [`Aggregator::new`], with a limit. It remembers `limit` requests under way and as many completed, of these
    /// 4096 at most, per side.
    pub fn with_limit(ranks: impl IntoIterator<Item = RankId>, limit: usize) -> Result<Aggregator> {
        let ranks: Vec<RankId> = ranks.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
        if ranks.is_empty() {
            return Err(Error::invalid("an aggregator needs the ranks whose reports it is to expect, none were given"));
        }
        if ranks.len() > MAX_RANKS as usize {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{} ranks were given to an aggregator, at most {MAX_RANKS} can be", ranks.len()),
            ));
        }
        let limit = limit.max(1);
        let [grant, send, recv] = [(); 3].map(|()| SideState::new(limit));
        Ok(Aggregator { ranks, limit, grant, send, recv, ready: Outcome::default() })
    }

    /// Requests under way, both directions together.
    pub fn pending(&self) -> usize {
        self.send.pending.len().saturating_add(self.recv.pending.len())
    }

    /// From now on `count` ranks, whichever, end `request`, in place of all ranks. May come before, between and after
    /// the reports; without effect once the request has ended.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] for 0 or more than there are ranks, [`ErrorKind::Exhausted`] when too many
    /// requests are under way.
    pub fn expect(&mut self, request: &RequestId, direction: RequestSide, count: u32) -> Result<()> {
        if count == 0 || count as usize > self.ranks.len() {
            return Err(Error::invalid(format!(
                "{count} reports were expected of request {request}, the engine has {} ranks: expect 1 to that many",
                self.ranks.len()
            )));
        }
        let limit = self.limit;
        let side = self.side_mut(direction);
        if side.done.contains_key(request) {
            return Ok(());
        }
        if !side.pending.contains_key(request) && side.pending.len() >= limit {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("request {request} would be one more under way than the limit of {limit}"),
            ));
        }
        side.pending.entry(request.clone()).or_default().count = Some(count);
        self.settle(request, direction);
        Ok(())
    }

    /// Takes one report, wholly or (on error) not at all.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] for a rank that is not the engine's; [`ErrorKind::Exhausted`] when too
    /// many requests are under way: [`Aggregator::end`] or [`Aggregator::forget`] what not all ranks will report, and
    /// add the report again.
    pub fn add(&mut self, report: &WorkerReport) -> Result<()> {
        let index = self.index(report.rank)?;
        let (sends, recvs) = wire::requests(report);
        let grants: BTreeSet<&RequestId> = report.granted.iter().collect();
        for (side, requests) in [(&self.grant, &grants), (&self.send, &sends), (&self.recv, &recvs)] {
            let new = requests.iter().filter(|r| !side.pending.contains_key(**r) && !side.done.contains_key(**r));
            if side.pending.len().saturating_add(new.count()) > self.limit {
                return Err(self.full(report.rank));
            }
        }
        let new_grants: BTreeSet<_> = grants.iter().filter(|request| self.grant.report(request, index)).collect();
        let new_sends: BTreeSet<_> = sends.iter().filter(|request| self.send.report(request, index)).collect();
        let new_recvs: BTreeSet<_> = recvs.iter().filter(|request| self.recv.report(request, index)).collect();
        for failure in report.failed_recving.iter().filter(|failure| new_recvs.contains(&&failure.request)) {
            if let Some(pending) = self.recv.pending.get_mut(&failure.request) {
                pending.failures.entry(report.rank).or_insert_with(|| (failure.cause, failure.message.clone()));
                pending.invalid.extend(failure.invalid_blocks.ids());
            }
        }
        let repeated = grants.len() + sends.len() + recvs.len() > 0
            && new_grants.is_empty()
            && new_sends.is_empty()
            && new_recvs.is_empty();
        if !repeated {
            self.ready.stats.merge(&report.stats);
            // A record of a request that this report does not end stands for itself.
            let new = |record: &&RecvRecord| new_recvs.contains(&&record.request) || !recvs.contains(&record.request);
            let records = report.records.iter().filter(new).map(|record| (report.rank, record.clone()));
            self.ready.records.extend(records);
        }
        // In the order in which the rank told them.
        for request in report.granted.iter().filter(|r| new_grants.contains(r)) {
            if self.grant.pending.get(request).is_some_and(|pending| pending.reported.len() >= self.ranks.len()) {
                let Some(pending) = self.grant.pending.remove(request) else { continue };
                self.grant.done.insert(request.clone(), pending.reported);
                self.ready.granted.push(request.clone());
            }
        }
        for request in report.finished_sending.iter().filter(|r| new_sends.contains(r)) {
            self.settle(request, RequestSide::Send);
        }
        let failed = report.failed_recving.iter().map(|failure| &failure.request);
        for request in report.finished_recving.iter().chain(failed).filter(|r| new_recvs.contains(r)) {
            self.settle(request, RequestSide::Recv);
        }
        Ok(())
    }

    /// Takes every report of a batch. On error the ranks before the failing one have been taken, and the batch can be
    /// added again.
    pub fn add_batch(&mut self, batch: &ReportBatch) -> Result<()> {
        batch.reports().try_for_each(|report| self.add(report))
    }

    /// Returns the requests that ended since the last poll, if any did.
    pub fn poll(&mut self) -> Option<Outcome> {
        let ready = std::mem::take(&mut self.ready);
        (!ready.is_empty()).then_some(ready)
    }

    /// Ends `request` on this side because the host knows that it is over. Reports about it are late ones from now
    /// on, and no outcome names it.
    pub fn end(&mut self, request: &RequestId, direction: RequestSide) {
        for side in self.sides(direction) {
            if !side.done.contains_key(request) {
                let reported = side.pending.remove(request).map(|pending| pending.reported).unwrap_or_default();
                side.done.insert(request.clone(), reported);
            }
        }
    }

    /// Forgets `request` on both sides, so that its id can be used again. A late report about it counts as the first
    /// of a new request.
    pub fn forget(&mut self, request: &RequestId) {
        self.forget_side(request, RequestSide::Send);
        self.forget_side(request, RequestSide::Recv);
    }

    /// As [`Aggregator::forget`], in one direction.
    pub fn forget_side(&mut self, request: &RequestId, direction: RequestSide) {
        for side in self.sides(direction) {
            side.pending.remove(request);
            side.done.remove(request);
        }
    }

    /// The state of this side; a prefill that is sent has been granted too.
    fn sides(&mut self, direction: RequestSide) -> impl Iterator<Item = &mut SideState> {
        let (side, grant) = match direction {
            RequestSide::Send => (&mut self.send, Some(&mut self.grant)),
            RequestSide::Recv => (&mut self.recv, None),
        };
        std::iter::once(side).chain(grant)
    }

    fn side_mut(&mut self, direction: RequestSide) -> &mut SideState {
        match direction {
            RequestSide::Send => &mut self.send,
            RequestSide::Recv => &mut self.recv,
        }
    }

    fn index(&self, rank: RankId) -> Result<usize> {
        self.ranks.binary_search(&rank).map_err(|_| {
            Error::invalid(format!(
                "a report of rank {rank}, which is not one of the engine's {}: state all of its ranks at the start",
                self.ranks.len()
            ))
        })
    }

    fn full(&self, rank: RankId) -> Error {
        Error::new(
            ErrorKind::Exhausted,
            format!(
                "the report of rank {rank} would bring the requests under way over the limit of {}; end or forget \
                 those that not all ranks will report, and add it again",
                self.limit
            ),
        )
    }

    /// Moves `request` to the outcome if all expected ranks have reported.
    fn settle(&mut self, request: &RequestId, direction: RequestSide) {
        let all = self.ranks.len();
        let side = self.side_mut(direction);
        let needed = |pending: &PendingRequest| pending.count.map_or(all, |count| count as usize);
        let complete = side.pending.get(request).is_some_and(|pending| pending.reported.len() >= needed(pending));
        if !complete {
            return;
        }
        let Some(pending) = side.pending.remove(request) else { return };
        side.done.insert(request.clone(), pending.reported);
        match direction {
            RequestSide::Send => self.ready.finished_sending.push(request.clone()),
            RequestSide::Recv => {
                self.ready.finished_recving.push(request.clone());
                if !pending.failures.is_empty() {
                    let causes =
                        pending.failures.into_iter().map(|(rank, (cause, text))| (rank, cause, text)).collect();
                    let invalid_blocks = pending.invalid.into_iter().collect::<Vec<u32>>().into();
                    self.ready.failed_recving.push(FailedRecv { request: request.clone(), causes, invalid_blocks });
                }
            }
        }
    }
}

impl SideState {
    fn new(limit: usize) -> SideState {
        SideState { pending: HashMap::new(), done: Latest::new(limit.min(MAX_COMPLETED)) }
    }

    /// Notes that the rank has reported `request`; whether that is news.
    fn report(&mut self, request: &RequestId, index: usize) -> bool {
        match self.done.get_mut(request) {
            Some(reported) => reported.insert(index),
            None => self.pending.entry(request.clone()).or_default().reported.insert(index),
        }
    }
}
