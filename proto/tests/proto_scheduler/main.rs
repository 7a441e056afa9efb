//! The scheduler side's state machine, call by call.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod refusals;
mod reports;
mod running;
mod turns;

use kvferry_proto::ErrorKind;
use kvferry_proto::aggregate::{Outcome, RequestSide};
use kvferry_proto::geometry::{Group, GroupKind};
use kvferry_proto::ids::{EngineId, Incarnation, RankId, RequestId};
use kvferry_proto::scheduler::{
    AllowedHosts, FinishOutcome, PrefillNotice, PrefixMatch, SchedulerMachine, SchedulerMachineConfig,
};
use kvferry_proto::stats::Stats;
use kvferry_proto::wire::limits::MAX_BLOCK_IDS;
use kvferry_proto::wire::{
    Blocks, Cause, Message, Prefill, RecvFailure, ReportBatch, StepMetadata, TransferParams, WorkerReport,
};

fn id(name: &str) -> RequestId {
    RequestId::new(name).unwrap()
}

fn ids(names: &[&str]) -> Vec<RequestId> {
    names.iter().map(|name| id(name)).collect()
}

/// A full group of 4 tokens a block, and a window of 6 tokens: at most 3 blocks.
fn config() -> SchedulerMachineConfig {
    SchedulerMachineConfig::new(
        EngineId::new("p").unwrap(),
        Incarnation(0xABC),
        vec![Group::new(GroupKind::Full, 4), Group::new(GroupKind::SlidingWindow { window: 6 }, 4)],
    )
}

fn scheduler() -> SchedulerMachine {
    let mut s = SchedulerMachine::new(config()).unwrap();
    s.set_address("10.1.2.3", 5680);
    s
}

fn take_step(scheduler: &mut SchedulerMachine) -> StepMetadata {
    StepMetadata::from_bytes(&scheduler.encode_step().unwrap()).unwrap()
}

fn lists(full: &[u32], window: &[u32]) -> Vec<Blocks> {
    vec![Blocks::from(full), Blocks::from(window)]
}

fn asked() -> TransferParams {
    TransferParams { do_remote_decode: true, ..Default::default() }
}

/// Params of a prompt of 18 tokens: 5 blocks.
fn offered() -> TransferParams {
    TransferParams {
        do_remote_prefill: true,
        remote_engine_id: Some("p".into()),
        remote_incarnation: Some("0000000000000abc".into()),
        remote_request_id: Some("p-1".into()),
        remote_host: Some("10.1.2.3".into()),
        remote_port: Some(5680),
        remote_block_ids: Some(vec![vec![11, 12, 13, 14, 15], vec![23, 24, 25]]),
        remote_num_tokens: Some(18),
        remote_lease_ms: Some(30_000),
        remote_lease_id: Some(4),
        transfer_mode: Some("pull".into()),
        ..Default::default()
    }
}

fn over(recving: &[&str], sending: &[&str]) -> ReportBatch {
    let (finished_sending, finished_recving) = (ids(sending), ids(recving));
    WorkerReport { finished_sending, finished_recving, ..WorkerReport::new(RankId { pp: 0, tp: 0 }) }.into()
}

fn granted(names: &[&str]) -> ReportBatch {
    WorkerReport { granted: ids(names), ..WorkerReport::new(RankId { pp: 0, tp: 0 }) }.into()
}

#[test]
fn a_complete_prefill_is_kept_granted_and_offered() {
    let mut s = scheduler();
    let blocks = lists(&[11, 12, 13, 14, 15], &[0, 0, 23, 24, 25]);
    let finish = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, blocks, 18).unwrap();
    assert!(finish.keep && s.has_pending());
    let p = finish.params.unwrap();
    assert_eq!((p.do_remote_prefill, p.do_remote_decode), (true, false));
    assert_eq!(p.remote_block_ids, Some(vec![vec![11, 12, 13, 14, 15], vec![23, 24, 25]]));
    assert_eq!((p.remote_host.as_deref(), p.remote_port), (Some("10.1.2.3"), Some(5680)));
    assert_eq!((p.remote_engine_id.as_deref(), p.remote_request_id.as_deref()), (Some("p"), Some("p-1")));
    assert_eq!(p.remote_incarnation.as_deref(), Some("0000000000000abc"));
    assert_eq!((p.remote_num_tokens, p.remote_lease_ms, p.remote_lease_id), (Some(18), Some(30_000), Some(1)));
    assert_eq!((p.tp_size, p.pp_size, p.dcp_size), (Some(1), Some(1), Some(1)));
    assert_eq!(p.transfer_mode.as_deref(), Some("pull"));
    let step = take_step(&mut s);
    assert_eq!((step.grants[0].request.as_str(), step.grants[0].lease_ms, step.grants[0].lease_id), ("p-1", 30_000, 1));
    assert!(!s.has_pending() && take_step(&mut s).is_empty());
    let again = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, lists(&[1], &[2]), 4).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    assert_eq!((s.sending(), s.stats().sending, s.stats().receiving), (1, 1, 0));
    s.on_report(&over(&[], &["p-1", "stranger"])).unwrap();
    assert_eq!((s.sending(), s.stats().sending), (0, 0));
    let mut d = scheduler();
    d.arrived(&id("d-1"), &p).unwrap();
    assert_eq!(take_step(&mut d).holds[0].remote.lease_id, 1, "what P offers, D understands");
}

#[test]
fn ids_of_leases_are_as_random_as_what_the_driver_gives_and_fit_json() {
    let mut s = scheduler();
    let most = (1 << 53) - 1;
    for (n, (random, id_of)) in
        [(0, 1), (most - 1, most), (most, 1), (u64::MAX, (u64::MAX % most) + 1), (77, 78)].into_iter().enumerate()
    {
        s.set_lease_entropy(random);
        let lists = lists(&[11], &[23]);
        let finish = s.finished(&id(&format!("p-{n}")), &asked(), FinishOutcome::Complete, lists, 4).unwrap();
        assert_eq!(finish.params.unwrap().remote_lease_id, Some(id_of as i64));
        assert_eq!(take_step(&mut s).grants[0].lease_id, id_of);
    }
}

#[test]
fn requests_that_others_may_follow_are_marked_for_the_workers() {
    let mut d = scheduler();
    for (name, shared) in [("a", None), ("b", Some(false)), ("c", Some(true))] {
        let params = TransferParams { shared, ..offered() };
        d.arrived(&id(name), &params).unwrap();
        d.allocated(&id(name), &params, lists(&[1, 2, 3, 4, 5], &[7, 8, 9]), 18, 18).unwrap();
        d.finished(&id(&format!("{name}-unknown")), &params, FinishOutcome::Aborted, vec![], 0).unwrap();
        let step = take_step(&mut d);
        let marks = [step.holds[0].remote.shared, step.loads[0].remote.shared, step.releases[0].remote.shared];
        assert_eq!(marks, [shared == Some(true); 3]);
    }
}

/// What a prefill engine is given by a proxy that asks both at once.
fn named(transfer_id: &str) -> TransferParams {
    TransferParams { transfer_id: Some(transfer_id.into()), ..asked() }
}

/// What a decode engine is given then.
fn announced() -> TransferParams {
    TransferParams {
        do_remote_prefill: true,
        transfer_id: Some("x-1".into()),
        remote_engine_id: Some("p".into()),
        remote_host: Some("10.1.2.3".into()),
        remote_port: Some(5680),
        ..Default::default()
    }
}

#[test]
fn a_named_prefill_is_known_by_its_name_and_who_awaits_it_is_told() {
    let mut s = scheduler();
    let blocks = || lists(&[11, 12, 13, 14, 15], &[0, 0, 23, 24, 25]);
    let finish = s.finished(&id("p-1"), &named("x-1"), FinishOutcome::Complete, blocks(), 18).unwrap();
    let params = finish.params.unwrap();
    assert_eq!((params.remote_request_id.as_deref(), params.transfer_id), (Some("x-1"), None));
    let prefill = Prefill {
        request: id("x-1"),
        blocks: lists(&[11, 12, 13, 14, 15], &[23, 24, 25]),
        tokens: 18,
        lease_ms: 30_000,
        lease_id: 1,
    };
    assert_eq!(s.poll_notice(), None, "no worker has the grant yet");
    s.on_report(&granted(&["x-1", "stranger"])).unwrap();
    assert_eq!(s.poll_notice(), None, "workers use the engine's own names");
    s.on_report(&granted(&["p-1"])).unwrap();
    s.on_report(&granted(&["p-1"])).unwrap();
    assert_eq!((s.poll_notice(), s.poll_notice()), (Some(PrefillNotice::Ready(prefill)), None));
    // The name is taken, whoever has it.
    for taken in [named("x-1"), TransferParams { transfer_id: None, ..asked() }] {
        let request = if taken.transfer_id.is_some() { "p-2" } else { "x-1" };
        let error = s.finished(&id(request), &taken, FinishOutcome::Complete, blocks(), 18).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.message().contains("transfer_id"), "{error}");
    }
    let step = take_step(&mut s);
    assert_eq!((step.grants[0].request.as_str(), step.grants[0].name.clone()), ("p-1", Some(id("x-1"))));
    assert_eq!((step.grants.len(), step.dropped.len(), s.poll_notice()), (1, 0, None));
    s.on_report(&over(&[], &["p-1"])).unwrap();
    assert_eq!((s.poll_notice(), s.poll_notice(), s.sending()), (Some(PrefillNotice::Gone(id("x-1"))), None, 0));
    // Without a hand-over: aborted, nothing computed, and a number of lists that is wrong.
    for (outcome, blocks, dropped) in [
        (FinishOutcome::Aborted, blocks(), true),
        (FinishOutcome::Complete, lists(&[], &[]), true),
        (FinishOutcome::Complete, vec![], false),
    ] {
        assert_eq!(s.finished(&id("p-3"), &named("x-3"), outcome, blocks, 18).is_ok(), dropped);
        assert_eq!((s.poll_notice(), s.poll_notice()), (Some(PrefillNotice::Gone(id("x-3"))), None));
        assert_eq!(take_step(&mut s).dropped, if dropped { vec![id("x-3")] } else { vec![] });
    }
    // One that is over before all ranks have confirmed it.
    s.finished(&id("p-6"), &named("x-6"), FinishOutcome::Complete, blocks(), 18).unwrap();
    s.on_report(&over(&[], &["p-6"])).unwrap();
    s.on_report(&granted(&["p-6"])).unwrap();
    assert_eq!((s.poll_notice(), s.poll_notice()), (Some(PrefillNotice::Gone(id("x-6"))), None));
    // A request without a name is nobody's to await.
    s.finished(&id("p-4"), &asked(), FinishOutcome::Complete, blocks(), 18).unwrap();
    s.on_report(&granted(&["p-4"])).unwrap();
    s.on_report(&over(&[], &["p-4"])).unwrap();
    assert_eq!(s.poll_notice(), None);
    for unusable in [String::new(), "x".repeat(513)] {
        let error = s.finished(&id("p-5"), &named(&unusable), FinishOutcome::Complete, blocks(), 18).unwrap_err();
        assert!(error.message().contains("request p-5") && error.message().contains("transfer_id"), "{error}");
    }
}

#[test]
fn where_blocks_are_written_late_a_decoder_asks_the_listener_for_them() {
    let mut s = SchedulerMachine::new(SchedulerMachineConfig { written_late: true, ..config() }).unwrap();
    s.set_address("10.1.2.3", 5680);
    let blocks = || lists(&[11, 12, 13, 14, 15], &[0, 0, 23, 24, 25]);
    for (request, asked, called) in [("p-1", asked(), "p-1"), ("p-2", named("x-2"), "x-2")] {
        let finish = s.finished(&id(request), &asked, FinishOutcome::Complete, blocks(), 18).unwrap();
        let params = finish.params.unwrap();
        assert_eq!((params.transfer_id.as_deref(), params.do_remote_prefill), (Some(called), true));
        assert_eq!((params.remote_request_id.clone(), params.remote_block_ids.clone()), (None, None));
        let grant = take_step(&mut s).grants.remove(0);
        assert_eq!((grant.request.as_str(), grant.name), (request, Some(id(called))));
        let mut d = scheduler();
        assert_eq!(d.matched(&id("d"), &params, 18, 0).unwrap().tokens, 18);
        assert!(d.matched(&id("d"), &params, 19, 0).is_err(), "how much is held is known all the same");
        d.allocated(&id("d"), &params, lists(&[1, 2, 3, 4, 5], &[6, 7, 8]), 18, 18).unwrap();
        let load = take_step(&mut d).loads.remove(0);
        assert_eq!((load.awaits, load.remote.request.as_str(), load.remote.lease_id), (true, called, grant.lease_id));
        assert_eq!(s.poll_notice(), None);
        s.on_report(&granted(&[request])).unwrap();
        assert!(matches!(s.poll_notice(), Some(PrefillNotice::Ready(prefill)) if prefill.request == id(called)));
        s.on_report(&over(&[], &[request])).unwrap();
        assert_eq!(s.poll_notice(), Some(PrefillNotice::Gone(id(called))));
    }
}

#[test]
fn a_request_may_come_before_its_prefill_is_over() {
    let mut s = scheduler();
    s.arrived(&id("d-1"), &announced()).unwrap();
    assert_eq!(s.matched(&id("d-1"), &announced(), 18, 4).unwrap(), PrefixMatch { tokens: 14, asynchronous: true });
    s.allocated(&id("d-1"), &announced(), lists(&[1, 2, 3, 4], &[5, 6]), 18, 14).unwrap();
    let step = take_step(&mut s);
    assert_eq!((step.holds[0].remote.request.as_str(), step.holds[0].remote.lease_id), ("x-1", 0));
    let load = &step.loads[0];
    assert!(load.awaits && load.remote_blocks.is_empty() && load.refused.is_none());
    assert_eq!((load.remote.request.as_str(), load.tokens), ("x-1", (4, 18)));
    // All of it is there already: the prefill is given back by its name.
    s.arrived(&id("d-2"), &announced()).unwrap();
    s.allocated(&id("d-2"), &announced(), lists(&[], &[]), 18, 0).unwrap();
    assert_eq!(take_step(&mut s).releases[0].remote.request.as_str(), "x-1");
    // With what an answer has, that counts.
    let both = TransferParams { transfer_id: Some("x-1".into()), ..offered() };
    s.allocated(&id("d-3"), &both, lists(&[1, 2, 3, 4, 5], &[6, 7, 8]), 18, 18).unwrap();
    let load = &take_step(&mut s).loads[0];
    assert_eq!((load.awaits, load.remote.request.as_str(), load.remote_blocks.len()), (false, "p-1", 2));

    type Change = fn(&mut TransferParams);
    let wrong: [(Change, &[&str]); 4] = [
        (|p| p.remote_host = None, &["needs remote_host, which is missing", "earlier answer"]),
        (|p| (p.remote_engine_id, p.remote_port) = (None, None), &["remote_engine_id, remote_port, which are missing"]),
        (|p| p.transfer_id = Some(String::new()), &["transfer_id:"]),
        (|p| p.transfer_id = None, &["remote_request_id, remote_block_ids", "or name the request to both"]),
    ];
    for (change, texts) in wrong {
        let mut params = announced();
        change(&mut params);
        let error = s.arrived(&id("d-4"), &params).unwrap_err();
        assert!(texts.iter().all(|text| error.message().contains(text)), "{error}");
        assert_eq!(s.matched(&id("d-4"), &params, 18, 0).unwrap_err(), error);
    }
}

#[test]
fn blocks_beyond_the_computed_tokens_and_outside_the_window_are_not_offered() {
    let mut s = scheduler();
    let blocks = lists(&[11, 12, 13, 14, 15, 16, 17], &[0, 21, 22, 23, 24, 25, 26]);
    let p = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, blocks, 18).unwrap().params.unwrap();
    assert_eq!(p.remote_block_ids, Some(vec![vec![11, 12, 13, 14, 15], vec![22, 23, 24]]));
}

#[test]
fn prefills_that_abort_or_have_no_blocks_are_dropped() {
    let mut s = scheduler();
    let aborted = s.finished(&id("a"), &asked(), FinishOutcome::Aborted, lists(&[1], &[2]), 4).unwrap();
    let empty = s.finished(&id("b"), &asked(), FinishOutcome::Complete, lists(&[], &[]), 4).unwrap();
    let nulls = s.finished(&id("c"), &asked(), FinishOutcome::Complete, lists(&[], &[0]), 4).unwrap();
    for finish in [aborted, empty, nulls] {
        assert_eq!((finish.keep, finish.params), (false, None));
    }
    let step = take_step(&mut s);
    assert_eq!((step.dropped.len(), step.grants.len(), s.sending()), (3, 0, 0));
    let plain = s.finished(&id("d"), &TransferParams::default(), FinishOutcome::Complete, lists(&[1], &[2]), 4);
    assert!(!plain.unwrap().keep && !s.has_pending(), "a request without params is none of ours");
}

#[test]
fn a_name_that_is_dropped_and_used_again_in_one_step_is_granted() {
    let mut s = scheduler();
    let blocks = || lists(&[1, 2], &[3, 4]);
    s.finished(&id("r"), &asked(), FinishOutcome::Aborted, blocks(), 4).unwrap();
    assert!(s.finished(&id("r"), &asked(), FinishOutcome::Complete, blocks(), 4).unwrap().keep);
    let step = take_step(&mut s);
    assert_eq!((step.grants.len(), step.dropped.len()), (1, 0), "the drop would end the lease that is granted");
}

#[test]
fn a_hand_over_without_a_listener_is_an_error_that_keeps_nothing() {
    let mut s = SchedulerMachine::new(config()).unwrap();
    let e = s.finished(&id("a"), &asked(), FinishOutcome::Complete, lists(&[1], &[2]), 4).unwrap_err();
    assert!(e.message().contains("serve"), "{e}");
    assert!(!s.has_pending() && s.sending() == 0);
    let mut s = scheduler();
    let e = s.finished(&id("a"), &asked(), FinishOutcome::Complete, vec![Blocks::from(vec![1])], 4).unwrap_err();
    assert!(e.message().contains("2 KV-cache groups, got 1"), "{e}");
}

#[test]
fn arriving_holds_and_allocating_loads_once() {
    let mut s = scheduler();
    s.arrived(&id("d"), &TransferParams::default()).unwrap();
    assert!(!s.has_pending());
    s.arrived(&id("d"), &offered()).unwrap();
    s.arrived(&id("d"), &offered()).unwrap();
    let step = take_step(&mut s);
    assert_eq!(step.holds.len(), 1);
    let remote = &step.holds[0].remote;
    assert_eq!((remote.engine.as_str(), remote.request.as_str(), remote.port), ("p", "p-1", 5680));
    assert_eq!((remote.incarnation, remote.lease_ms, remote.lease_id), (Some(Incarnation(0xABC)), 30_000, 4));
    assert_eq!(s.matched(&id("d"), &offered(), 18, 8).unwrap(), PrefixMatch { tokens: 10, asynchronous: true });
    assert_eq!(s.matched(&id("d"), &offered(), 18, 18).unwrap(), PrefixMatch::default());
    s.allocated(&id("d"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    s.allocated(&id("d"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 0).unwrap();
    let step = take_step(&mut s);
    assert_eq!((step.loads.len(), step.releases.len()), (1, 0));
    let load = &step.loads[0];
    assert_eq!(load.refused, None);
    assert_eq!((load.tokens, load.remote_tokens, load.null_block), ((8, 18), 18, Some(0)));
    assert_eq!(load.local_blocks, lists(&[1, 2, 3], &[0, 5, 6]));
    assert_eq!(load.remote_blocks, lists(&[11, 12, 13, 14, 15], &[23, 24, 25]));
    assert!(!load.window_only, "blocks are reused unless the host says that they are not");
    assert_eq!((s.stats().receiving, s.stats().sending), (1, 0));
    assert_eq!(s.matched(&id("d"), &offered(), 18, 0).unwrap(), PrefixMatch::default(), "after a preemption too");
    s.on_report(&over(&["d", "stranger"], &[])).unwrap();
    let finish = s.finished(&id("d"), &offered(), FinishOutcome::Complete, vec![], 0).unwrap();
    assert!(!finish.keep && !s.has_pending(), "a loaded request owes nothing");
    assert_eq!(s.receiving(), 0);
}

#[test]
fn new_workers_are_told_what_waits() {
    let mut s = scheduler();
    for name in ["waits", "loads", "queued"] {
        s.arrived(&id(name), &offered()).unwrap();
        if name != "queued" {
            assert_eq!(take_step(&mut s).holds.len(), 1);
        }
    }
    s.allocated(&id("loads"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    assert_eq!(take_step(&mut s).loads.len(), 1);
    s.renew_engine(Incarnation(0xD), vec![]);
    let step = take_step(&mut s);
    let mut holds: Vec<&str> = step.holds.iter().map(|hold| hold.request.as_str()).collect();
    holds.sort_unstable();
    // What the old workers loaded they have reported. What no step took is told once.
    assert_eq!((holds, step.loads.len()), (vec!["queued", "waits"], 0));
    s.arrived(&id("fresh"), &offered()).unwrap();
    s.renew_engine(Incarnation(0xE), vec![]);
    let step = take_step(&mut s);
    let holds: Vec<&str> = step.holds.iter().map(|hold| hold.request.as_str()).collect();
    assert_eq!(holds, ["fresh", "queued", "waits"]);
    assert_eq!(step.holds[2].remote.request.as_str(), "p-1");
}

#[test]
fn the_producer_may_have_other_groups_and_block_sizes() {
    let mut config = config();
    config.reuses_blocks = false;
    let mut s = SchedulerMachine::new(config).unwrap();
    let params = TransferParams { remote_block_ids: Some(vec![vec![7]]), remote_num_tokens: Some(20), ..offered() };
    s.allocated(&id("d"), &params, lists(&[1, 2, 3, 4, 5], &[31, 32, 33, 34, 35]), 18, 18).unwrap();
    let load = &take_step(&mut s).loads[0];
    assert_eq!((load.refused.as_ref(), load.tokens, load.remote_tokens, load.window_only), (None, (0, 18), 20, true));
    assert_eq!(load.remote_blocks, [Blocks::from(vec![7])]);
}

#[test]
fn blocks_that_the_tokens_do_not_fit_become_a_load_that_is_refused_by_name() {
    for (blocks, tokens, words) in [
        (
            lists(&[1, 2, 3, 4, 5, 6], &[]),
            18,
            "group 0: tokens 0 to 18 are to be loaded, which 5 blocks of 4 tokens hold",
        ),
        (lists(&[1, 2], &[]), 10, "group 0: tokens 8 to 18"),
        (lists(&[1, 2, 3, 4, 5], &[1; 6]), 18, "group 1: tokens 0 to 18"),
        (lists(&[1, 2, 3, 4, 5], &[]), 19, "19 tokens are to be loaded of 18"),
    ] {
        let mut s = scheduler();
        s.allocated(&id("d"), &offered(), blocks.clone(), 18, tokens).unwrap();
        let load = &take_step(&mut s).loads[0];
        let text = load.refused.as_ref().expect("refused");
        assert!(text.contains(words), "{text}");
        assert_eq!(load.local_blocks, blocks, "all of them are suspect");
    }
    let e = scheduler().allocated(&id("d"), &offered(), vec![Blocks::default()], 18, 18).unwrap_err();
    assert!(e.message().contains("2 KV-cache groups, got 1"), "{e}");
}

#[test]
fn a_state_is_handed_over_one_token_before_the_end() {
    let config = SchedulerMachineConfig {
        groups: vec![Group::new(GroupKind::Full, 4), Group::new(GroupKind::State, 1)],
        ..config()
    };
    let mut s = SchedulerMachine::new(config.clone()).unwrap();
    s.set_address("10.1.2.3", 5680);
    let held = |n| TransferParams { remote_num_tokens: Some(n), ..offered() };
    let e = s.matched(&id("d"), &held(18), 18, 0).unwrap_err();
    assert!(e.message().contains("after 18 tokens, 17 are needed"), "{e}");
    assert_eq!(s.matched(&id("d"), &held(17), 18, 0).unwrap().tokens, 17);
    s.allocated(&id("d"), &held(17), lists(&[1, 2, 3, 4, 5], &[9]), 18, 17).unwrap();
    let load = &take_step(&mut s).loads[0];
    assert_eq!((load.refused.as_ref(), load.tokens), (None, (0, 17)));
    let finish = s.finished(&id("p-1"), &asked(), FinishOutcome::Complete, lists(&[1, 2, 3, 4, 5], &[0, 6, 7]), 17);
    assert_eq!(finish.unwrap().params.unwrap().remote_block_ids, Some(vec![vec![1, 2, 3, 4, 5], vec![7]]));
}

#[test]
fn whatever_is_not_loaded_is_released() {
    let mut s = scheduler();
    s.arrived(&id("hit"), &offered()).unwrap();
    s.allocated(&id("hit"), &offered(), vec![], 18, 0).unwrap();
    let step = take_step(&mut s);
    assert_eq!((step.holds.len(), step.releases.len()), (0, 1), "a hold that no step took is not sent any more");
    s.arrived(&id("waiting"), &offered()).unwrap();
    assert_eq!(take_step(&mut s).holds.len(), 1);
    assert!(!s.finished(&id("waiting"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(!s.finished(&id("rejected"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(s.has_pending());
    let released: Vec<String> = take_step(&mut s).releases.iter().map(|r| r.request.to_string()).collect();
    assert_eq!(released, ["waiting", "rejected"]);
    assert!(!s.finished(&id("hit"), &offered(), FinishOutcome::Complete, vec![], 0).unwrap().keep);
    assert!(!s.has_pending() && s.receiving() == 0);
    let broken = TransferParams { do_remote_prefill: true, ..Default::default() };
    assert!(!s.finished(&id("x"), &broken, FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(!s.has_pending(), "nobody to release to");
}

#[test]
fn a_request_that_ends_under_its_load_is_aborted_and_keeps_its_blocks() {
    let mut s = scheduler();
    s.allocated(&id("d"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    assert!(s.finished(&id("d"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    assert!(s.finished(&id("d"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    let step = take_step(&mut s);
    assert_eq!((step.loads.len(), step.aborts), (1, vec![id("d")]));
    assert_eq!(s.receiving(), 1);
    s.on_report(&over(&["d"], &[])).unwrap();
    assert_eq!(s.receiving(), 0);
    s.allocated(&id("e"), &offered(), lists(&[1, 2, 3], &[0, 5, 6]), 18, 10).unwrap();
    let _ = take_step(&mut s);
    assert!(s.finished(&id("e"), &offered(), FinishOutcome::Aborted, vec![], 0).unwrap().keep);
    s.on_report(&over(&["e"], &[])).unwrap();
    assert!(!s.has_pending(), "an abort of what is over is not sent");
}
