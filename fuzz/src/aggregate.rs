//! Aggregation: arbitrary reports of the ranks of an engine, in any order and grouping. A request is over once, when and
//! only when every rank that is expected has reported it, and batches merge alike in either order.

use std::collections::{BTreeMap, BTreeSet};

use kvferry::proto::aggregate::{Aggregator, Outcome};
use kvferry::proto::ids::{RankId, RequestId};
use kvferry::proto::stats::Stats;
use kvferry::proto::wire::{Cause, Message, RecvFailure, ReportBatch, WorkerReport};

use super::Source;
use super::machines::rank::request;

const RANKS: usize = 3;

fn report(source: &mut Source) -> WorkerReport {
    let some = |source: &mut Source| -> Vec<RequestId> {
        let count = source.below(3);
        (0..count).map(|_| request(format!("r{}", source.below(5)))).collect()
    };
    let finished_sending = some(source);
    let finished_recving = some(source);
    let failed_recving = some(source)
        .into_iter()
        .map(|request| RecvFailure {
            request,
            cause: Cause::ALL[source.below(Cause::ALL.len())],
            message: "why".into(),
            invalid_blocks: source.bytes(2).iter().map(|&b| u32::from(b)).collect::<Vec<_>>().into(),
        })
        .collect();
    let ranks = RANKS + usize::from(source.rarely(16));
    WorkerReport {
        granted: vec![],
        rank: RankId { pp: 0, tp: source.below(ranks) as u32 },
        finished_sending,
        finished_recving,
        failed_recving,
        records: vec![],
        stats: Stats { bytes: source.number(), recvs: 1, ..Stats::default() },
    }
}

/// What is known of a request in one direction: who has reported it, and whether it is over.
#[derive(Default)]
struct Known {
    reported: BTreeSet<RankId>,
    over: bool,
}

#[derive(Default)]
struct Model {
    known: BTreeMap<(bool, RequestId), Known>,
}

impl Model {
    fn add(&mut self, report: &WorkerReport) {
        let failed = report.failed_recving.iter().map(|failure| &failure.request);
        let recvs = report.finished_recving.iter().chain(failed).map(|request| (true, request));
        for (recv, request) in report.finished_sending.iter().map(|r| (false, r)).chain(recvs) {
            self.known.entry((recv, request.clone())).or_default().reported.insert(report.rank);
        }
    }

    fn over(&mut self, outcome: &Outcome) {
        for failed in &outcome.failed_recving {
            assert!(outcome.finished_recving.contains(&failed.request), "what failed is over too");
        }
        let sends = outcome.finished_sending.iter().map(|r| (false, r.clone()));
        for key in sends.chain(outcome.finished_recving.iter().map(|r| (true, r.clone()))) {
            let known = self.known.get_mut(&key).expect("only what was reported is over");
            assert!(!known.over, "{} is over twice", key.1);
            assert_eq!(known.reported.len(), RANKS, "{} is over before every rank has reported", key.1);
            known.over = true;
        }
        for (key, known) in &self.known {
            assert_eq!(known.over, known.reported.len() == RANKS, "{} is over when every rank has reported", key.1);
        }
    }
}

/// A sequence of reports, batches and polls.
pub fn run(data: &[u8]) {
    let mut source = Source::new(data);
    let ranks = (0..RANKS as u32).map(|tp| RankId { pp: 0, tp });
    let mut aggregator = Aggregator::new(ranks).unwrap();
    let mut model = Model::default();
    for _ in 0..200 {
        if source.is_empty() {
            break;
        }
        match source.below(8) {
            0..=3 => {
                let report = report(&mut source);
                let taken = aggregator.add(&report);
                assert_eq!(taken.is_ok(), (report.rank.tp as usize) < RANKS);
                if taken.is_ok() {
                    model.add(&report);
                }
            }
            4 | 5 => {
                let count = source.below(4);
                let reports: Vec<WorkerReport> = (0..count).map(|_| report(&mut source)).collect();
                let (mut forward, mut backward) = (ReportBatch::new(), ReportBatch::new());
                reports.iter().for_each(|report| forward.merge(report.clone().into()));
                reports.iter().rev().for_each(|report| backward.merge(report.clone().into()));
                assert_eq!(forward, backward, "batches merge alike in either order");
                assert_eq!(ReportBatch::from_bytes(&forward.to_bytes().unwrap()).unwrap(), forward);
                // On an error the ranks before the failing one have been taken.
                let strangers = forward.reports().any(|report| report.rank.tp as usize >= RANKS);
                assert_eq!(aggregator.add_batch(&forward).is_err(), strangers);
                forward.reports().filter(|report| (report.rank.tp as usize) < RANKS).for_each(|r| model.add(r));
            }
            6 => {
                let outcome = aggregator.poll().unwrap_or_default();
                model.over(&outcome);
            }
            _ => {
                let outcome = aggregator.poll().unwrap_or_default();
                model.over(&outcome);
                let name = request(format!("r{}", source.below(5)));
                aggregator.forget(&name);
                model.known.retain(|key, _| key.1 != name);
            }
        }
    }
    let outcome = aggregator.poll().unwrap_or_default();
    model.over(&outcome);
    let under_way = model.known.values().filter(|known| !known.over).count();
    assert_eq!(aggregator.pending(), under_way);
}
