//! One scheduler machine and arbitrary calls of its host, in any order. Each request has at most one load under way,
//! blocks are kept exactly while a report is owed, and what is over is forgotten. With conversations (the last byte says
//! whether), those that are kept are no more than may be, and the oldest are evicted first.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry::proto::ids::{Incarnation, RankId, RequestId};
use kvferry::proto::scheduler::{FinishOutcome, MultiTurn, SchedulerMachine, SchedulerMachineConfig};
use kvferry::proto::stats::Stats;
use kvferry::proto::wire::{Blocks, Message, StepMetadata, TransferParams, WorkerReport};

use super::Source;
use super::machines::rank;

/// The most blocks that conversations keep.
const MOST_BLOCKS: u64 = 8;

/// Conversations evicted in all runs of this process: whether the rules about them have been tried.
pub static EVICTED: AtomicU64 = AtomicU64::new(0);

fn scheduler(conversations: bool) -> SchedulerMachine {
    let multi_turn = conversations.then_some(MultiTurn { lease_ms: 5000, least_tokens: 3, most_blocks: MOST_BLOCKS });
    let config = SchedulerMachineConfig::new(rank::engine("d"), Incarnation(5), rank::groups());
    let mut scheduler = SchedulerMachine::new(SchedulerMachineConfig { multi_turn, ..config }).unwrap();
    scheduler.set_address("10.0.0.1", 5680);
    scheduler
}

fn take_step(scheduler: &mut SchedulerMachine) -> StepMetadata {
    StepMetadata::from_bytes(&scheduler.encode_step().unwrap()).unwrap()
}

/// Whatever the params are, every call with them ends.
pub fn try_params(params: &TransferParams) {
    let mut scheduler = scheduler(params.shared.is_none());
    let id = rank::request("r");
    let _ = scheduler.arrived(&id, params);
    let prompt = params.remote_num_tokens.and_then(|n| u64::try_from(n).ok()).unwrap_or(8);
    let tokens = scheduler.matched(&id, params, prompt, 0).map_or(0, |found| found.tokens);
    let lists = vec![vec![1, 2].into(), vec![3].into()];
    let _ = scheduler.allocated(&id, params, lists, prompt, tokens);
    let _ = scheduler.finished(&id, params, FinishOutcome::Complete, vec![], 0);
    let step = take_step(&mut scheduler);
    assert_eq!(StepMetadata::from_bytes(&step.to_bytes().unwrap()).unwrap(), step);
}

fn params(source: &mut Source, name: &str, conversations: bool) -> TransferParams {
    let mut params = TransferParams {
        do_remote_prefill: true,
        remote_engine_id: Some("p".into()),
        remote_incarnation: Some("0000000000000003".into()),
        remote_request_id: Some(name.into()),
        remote_host: Some("10.0.0.2".into()),
        remote_port: Some(5681),
        remote_block_ids: Some(vec![vec![1, 2, 3, 4], vec![5, 6]]),
        remote_num_tokens: Some(8),
        remote_lease_ms: Some(1000),
        remote_lease_id: Some(1),
        tp_size: Some(1),
        pp_size: Some(1),
        dcp_size: Some(1),
        transfer_mode: Some("pull".into()),
        ..TransferParams::default()
    };
    if conversations && source.rarely(3) {
        // A prefill of the next turn.
        (params.do_remote_prefill, params.do_remote_decode) = (false, true);
    }
    if source.rarely(4) {
        match source.below(10) {
            0 => params.do_remote_prefill = false,
            1 => params.do_remote_decode = true,
            2 => params.remote_engine_id = None,
            3 => params.remote_incarnation = Some("zz".into()),
            4 => params.remote_port = Some(source.number() as i64),
            5 => params.remote_block_ids = Some(vec![vec![source.number() as i64]]),
            6 => params.remote_num_tokens = Some(source.number() as i64),
            7 => params.remote_lease_ms = Some(source.number() as i64),
            8 => params.remote_host = Some(String::new()),
            _ => params.remote_request_id = None,
        }
    }
    params
}

#[derive(Default)]
struct Model {
    /// Loads without a report, and whether their request has ended.
    loading: HashMap<RequestId, bool>,
    sending: HashSet<RequestId>,
    /// Requests that had their load and have not ended.
    loaded: HashSet<RequestId>,
    /// Conversations that are kept, the oldest first, and how many blocks each has.
    histories: VecDeque<(RequestId, u64)>,
    /// Those that are evicted, until a report says that nobody reads them any more; and whether a step has said so.
    let_go: HashMap<RequestId, bool>,
}

impl Model {
    /// A conversation is kept, for which the oldest give way.
    fn keep_history(&mut self, id: RequestId, answer: &TransferParams) {
        let blocks = answer.remote_block_ids.iter().flatten().map(|list| list.len() as u64).sum();
        assert!(blocks <= MOST_BLOCKS, "{id}: more than all that may be kept");
        while self.histories.iter().map(|(_, blocks)| blocks).sum::<u64>() + blocks > MOST_BLOCKS {
            self.forget(1);
        }
        self.histories.push_back((id, blocks));
    }

    /// How many conversations have been evicted and are not reported yet.
    fn forget(&mut self, most: usize) -> usize {
        let count = self.histories.len().min(most);
        EVICTED.fetch_add(count as u64, Ordering::Relaxed);
        self.let_go.extend(self.histories.drain(..count).map(|(id, _)| (id, false)));
        self.let_go.len()
    }

    fn sent(&mut self, id: &RequestId) {
        self.sending.remove(id);
        self.let_go.remove(id);
        self.histories.retain(|(kept, _)| kept != id);
    }

    fn take(&mut self, step: &StepMetadata) {
        assert_eq!(StepMetadata::from_bytes(&step.to_bytes().unwrap()).unwrap(), *step);
        for load in &step.loads {
            assert!(self.loading.contains_key(&load.request), "{}: a load that nobody asked for", load.request);
        }
        let mut named = HashSet::new();
        assert!(step.loads.iter().all(|load| named.insert(&load.request)), "a request is loaded twice in a step");
        assert!(step.aborts.iter().all(|id| self.loading.get(id) == Some(&true)), "only a load that ended is aborted");
        assert!(step.grants.iter().all(|grant| self.sending.contains(&grant.request)), "only what is kept is granted");
        let kept = |id: &RequestId| self.sending.contains(id) && !self.let_go.contains_key(id);
        assert!(!step.dropped.iter().any(kept), "what is kept is not dropped");
        for (id, told) in &mut self.let_go {
            assert!(*told || step.dropped.contains(id), "{id}: workers are told at once what is evicted");
            *told = true;
        }
    }
}

fn report(sending: Vec<RequestId>, recving: Vec<RequestId>) -> WorkerReport {
    WorkerReport {
        granted: vec![],
        rank: RankId { pp: 0, tp: 0 },
        finished_sending: sending,
        finished_recving: recving,
        failed_recving: vec![],
        records: vec![],
        stats: Stats::default(),
    }
}

/// A sequence of calls.
pub fn run(data: &[u8]) {
    // Behind the others, so that these mean the same with and without.
    let (conversations, data) = data.split_last().map_or((false, data), |(last, data)| (last & 1 == 1, data));
    let mut source = Source::new(data);
    let mut scheduler = scheduler(conversations);
    let mut model = Model::default();
    for _ in 0..300 {
        if source.is_empty() {
            break;
        }
        let name = format!("r{}", source.below(4));
        let id = rank::request(&name);
        match source.below(if conversations { 9 } else { 8 }) {
            0 => _ = scheduler.arrived(&id, &params(&mut source, &name, conversations)),
            1 => {
                let params = params(&mut source, &name, conversations);
                let prompt = if source.rarely(4) { source.number() } else { 8 };
                let found = scheduler.matched(&id, &params, prompt, source.number());
                if model.loading.contains_key(&id) || model.loaded.contains(&id) {
                    assert!(found.map_or(0, |found| found.tokens) == 0, "{id}: one load per request");
                }
            }
            2 | 3 => {
                let params = params(&mut source, &name, conversations);
                let first = source.byte().into();
                let external = if source.rarely(4) { source.number() } else { 8 };
                let mut lists: Vec<Blocks> =
                    vec![vec![first, first + 1, first + 2, first + 3].into(), vec![first, first + 1].into()];
                lists.truncate(if source.rarely(16) { 1 } else { 2 });
                let done = scheduler.allocated(&id, &params, lists, 8, external);
                let fresh = !model.loading.contains_key(&id) && !model.loaded.contains(&id);
                let history = conversations && params.do_remote_decode && params.remote_block_ids.is_some();
                if done.is_ok() && fresh && (params.do_remote_prefill || history) {
                    if external == 0 {
                        model.loaded.insert(id);
                    } else {
                        model.loading.insert(id, false);
                    }
                }
            }
            4 => {
                let decode = source.rarely(3);
                let asked = TransferParams { do_remote_decode: decode, ..Default::default() };
                let params = if decode { asked } else { params(&mut source, &name, conversations) };
                let outcome = if source.flag() { FinishOutcome::Complete } else { FinishOutcome::Aborted };
                let lists = vec![vec![1, 2].into(), vec![3, 4].into()];
                let finish = scheduler.finished(&id, &params, outcome, lists, 4);
                if let Some(ended) = model.loading.get_mut(&id) {
                    assert!(finish.expect("an end is taken").keep, "{id}: blocks stay while they may be written");
                    *ended = true;
                } else if model.loaded.remove(&id) && !conversations {
                    assert!(!finish.expect("an end is taken").keep);
                } else if let Ok(finish) = finish {
                    assert_eq!(finish.keep, finish.params.is_some(), "{id}: kept for a decoder exactly if it is told");
                    if let Some(answer) = &finish.params {
                        assert!(model.sending.insert(id.clone()), "kept twice");
                        if answer.do_remote_decode {
                            assert!(conversations && outcome == FinishOutcome::Complete && params.do_remote_prefill);
                            model.keep_history(id, answer);
                        }
                    }
                }
            }
            5 => model.take(&take_step(&mut scheduler)),
            6 => {
                model.take(&take_step(&mut scheduler));
                scheduler.on_report(&report(vec![], vec![id.clone()]).into()).unwrap();
                if model.loading.remove(&id) == Some(false) {
                    model.loaded.insert(id);
                }
            }
            7 => {
                model.take(&take_step(&mut scheduler));
                scheduler.on_report(&report(vec![id.clone()], vec![]).into()).unwrap();
                model.sent(&id);
            }
            _ => {
                let most = if source.rarely(4) { usize::MAX } else { source.below(3) };
                assert_eq!(scheduler.forget_histories(most), model.forget(most));
            }
        }
        assert_eq!(scheduler.sending(), model.sending.len());
        assert!(scheduler.receiving() >= model.loading.len() + model.loaded.len());
    }
    let names: Vec<RequestId> = (0..4).map(|n| rank::request(format!("r{n}"))).collect();
    model.take(&take_step(&mut scheduler));
    scheduler.on_report(&report(names.clone(), names.clone()).into()).unwrap();
    for id in &names {
        let _ = scheduler.finished(id, &TransferParams::default(), FinishOutcome::Aborted, vec![], 0);
    }
    assert_eq!((scheduler.receiving(), scheduler.sending()), (0, 0), "what is over is forgotten");
}
