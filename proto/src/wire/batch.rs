//! Reports of several ranks on their way to the scheduler side, before they are aggregated.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Blocks, RecvFailure, WorkerReport};
use crate::ids::{RankId, RequestId};

/// Reports of any ranks, one entry per rank. Batches merge associatively and commutatively, and the empty batch is the
/// identity, so that a host can combine them in any order and grouping (vLLM: `KVConnectorWorkerMetadata.aggregate`).
/// Merging the same report twice counts its statistics twice, everything else once.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "WireBatch", into = "WireBatch")]
pub struct ReportBatch {
    reports: BTreeMap<RankId, WorkerReport>,
}

#[derive(Serialize, Deserialize)]
struct WireBatch {
    reports: Vec<WorkerReport>,
}

impl ReportBatch {
    /// A batch of no reports.
    pub fn new() -> ReportBatch {
        ReportBatch::default()
    }

    /// True if there is no report in it.
    pub fn is_empty(&self) -> bool {
        self.reports.is_empty()
    }

    /// The reports, by rank.
    pub fn reports(&self) -> impl Iterator<Item = &WorkerReport> {
        self.reports.values()
    }

    /// Adds one report.
    pub fn add(&mut self, report: WorkerReport) {
        let report = canonical(report);
        match self.reports.get_mut(&report.rank) {
            Some(known) => combine(known, report),
            None => {
                self.reports.insert(report.rank, report);
            }
        }
    }

    /// Adds all reports of `other`.
    pub fn merge(&mut self, other: ReportBatch) {
        other.reports.into_values().for_each(|report| self.add(report));
    }
}

impl From<WorkerReport> for ReportBatch {
    fn from(report: WorkerReport) -> Self {
        let mut batch = ReportBatch::new();
        batch.add(report);
        batch
    }
}

impl From<WireBatch> for ReportBatch {
    fn from(wire: WireBatch) -> Self {
        let mut batch = ReportBatch::new();
        wire.reports.into_iter().for_each(|report| batch.add(report));
        batch
    }
}

impl From<ReportBatch> for WireBatch {
    fn from(batch: ReportBatch) -> Self {
        WireBatch { reports: batch.reports.into_values().collect() }
    }
}

fn union<T: Ord>(ids: &mut Vec<T>, more: Vec<T>) {
    ids.extend(more);
    ids.sort_unstable();
    ids.dedup();
}

/// The union of two block lists, ascending.
fn union_blocks(a: &Blocks, b: &Blocks) -> Blocks {
    let mut ids = a.ids().to_vec();
    union(&mut ids, b.ids().to_vec());
    ids.into()
}

/// One failure per request. Of two about the same request the lesser cause and text stay, whatever their order.
fn failures(all: impl IntoIterator<Item = RecvFailure>) -> Vec<RecvFailure> {
    let mut by_request: BTreeMap<RequestId, RecvFailure> = BTreeMap::new();
    for mut failure in all {
        failure.invalid_blocks = union_blocks(&failure.invalid_blocks, &Blocks::default());
        match by_request.get_mut(&failure.request) {
            Some(known) => {
                let invalid_blocks = union_blocks(&known.invalid_blocks, &failure.invalid_blocks);
                if (failure.cause, &failure.message) < (known.cause, &known.message) {
                    *known = failure;
                }
                known.invalid_blocks = invalid_blocks;
            }
            None => {
                by_request.insert(failure.request.clone(), failure);
            }
        }
    }
    by_request.into_values().collect()
}

/// The form in which equal reports are equal values: sorted, nothing twice.
fn canonical(mut report: WorkerReport) -> WorkerReport {
    union(&mut report.granted, Vec::new());
    union(&mut report.finished_sending, Vec::new());
    union(&mut report.finished_recving, Vec::new());
    union(&mut report.records, Vec::new());
    report.failed_recving = failures(report.failed_recving);
    report
}

fn combine(known: &mut WorkerReport, more: WorkerReport) {
    union(&mut known.granted, more.granted);
    union(&mut known.finished_sending, more.finished_sending);
    union(&mut known.finished_recving, more.finished_recving);
    union(&mut known.records, more.records);
    known.failed_recving = failures(std::mem::take(&mut known.failed_recving).into_iter().chain(more.failed_recving));
    known.stats.merge(&more.stats);
}

/// The requests that a report is about: sends, receives (failed ones included).
pub(crate) fn requests(report: &WorkerReport) -> (BTreeSet<&RequestId>, BTreeSet<&RequestId>) {
    let recvs = report.finished_recving.iter().chain(report.failed_recving.iter().map(|failure| &failure.request));
    (report.finished_sending.iter().collect(), recvs.collect())
}
