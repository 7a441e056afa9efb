//! What goes wrong between engines: each gives a terminal report with a cause that says what to do, and the next
//! request works.

use std::time::{Duration, Instant};

use crate::common::cache::CacheSpec;
use crate::common::child::{Ask, LONG, Lists, Tell};
use crate::common::engine::{Engine, Said, blocks, lists, scheduler_config};
use crate::common::ports::unused_port;
use kvferry::ErrorKind;
use kvferry::connector::{Scheduler, Transport, WorkerConfig};
use kvferry::net::query;
use kvferry::proto::ids::{EngineId, RankId};
use kvferry::proto::scheduler::FinishOutcome;
use kvferry::proto::wire::{Cause, HandshakeReply, Message, RefusalCode, StepMetadata, TransferParams};
use rustix::process::Signal;

fn pair(cache: &CacheSpec) -> (Engine, Engine) {
    let p = Engine::start("prefill", cache, Transport::Tcp);
    let d = Engine::start("decode", &CacheSpec { seed: cache.seed + 1000, ..cache.clone() }, Transport::Tcp);
    (p, d)
}

/// Every rank failed with `cause`, and said all of `parts`; all blocks are invalid.
fn assert_failed(said: &Said, ranks: usize, cause: Cause, parts: &[&str], here: &[Vec<u32>]) {
    assert_eq!(said.failures.len(), ranks, "{said:#?}");
    let mut all: Vec<u32> = here.iter().flatten().copied().filter(|id| *id != 0).collect();
    all.sort_unstable();
    all.dedup();
    for failure in said.failures.values() {
        assert_eq!(failure.cause, cause, "{}", failure.message);
        for part in parts {
            assert!(failure.message.contains(part), "{part:?} is not in {:?}", failure.message);
        }
        let mut invalid = failure.invalid_blocks.ids().to_vec();
        invalid.sort_unstable();
        invalid.dedup();
        assert_eq!(invalid, all);
    }
}

/// A hand-over that must work, to show that what went before broke nothing.
fn works(p: &mut Engine, d: &mut Engine, name: &str) {
    works_beside(p, d, name, &[]);
}

/// As `works`, where earlier reads left bytes in blocks of D.
fn works_beside(p: &mut Engine, d: &mut Engine, name: &str, earlier: &[(&str, &Lists)]) {
    let (there, here) = (lists(25, 3, true), lists(29, 3, false));
    let params = p.prefill(name, &there, 12);
    d.load(name, &params, &here, 12);
    let said = d.await_received(name);
    assert!(said.failures.is_empty(), "{said:#?}");
    p.await_sent(name);
    let mut loads = earlier.to_vec();
    loads.push((name, &here));
    d.check(&loads);
}

#[test]
fn an_unreachable_head_fails_the_request_only() {
    let cache = CacheSpec::small(1, 1, 20);
    let (mut p, mut d) = pair(&cache);
    let here = lists(1, 3, false);
    let good = p.prefill("good", &lists(5, 3, false), 12);
    let port = unused_port();
    let bad = TransferParams { remote_port: Some(i64::from(port)), ..good.clone() };
    d.load("bad", &bad, &here, 12);
    let said = d.await_received("bad");
    assert_failed(&said, 1, Cause::HandshakeFailed, &[&format!("127.0.0.1:{port}"), "check that"], &here);
    works(&mut p, &mut d, "next");
}

#[test]
fn wrong_engines_unknown_ranks_and_incarnations_are_refused_by_name() {
    let cache = CacheSpec::small(1, 1, 21);
    let (mut p, mut d) = pair(&cache);
    let here = lists(1, 3, false);
    let good = p.prefill("good", &lists(5, 3, false), 12);
    let other = TransferParams { remote_engine_id: Some("someone-else".into()), ..good.clone() };
    d.load("wrong-engine", &other, &here, 12);
    let said = d.await_received("wrong-engine");
    assert_failed(&said, 1, Cause::HandshakeFailed, &["someone-else", "prefill", "check the host and port"], &here);
    let earlier = TransferParams { remote_incarnation: Some("00000000000000aa".into()), ..good.clone() };
    d.load("earlier-life", &earlier, &here, 12);
    let said = d.await_received("earlier-life");
    assert_failed(&said, 1, Cause::PeerDied, &["restarted"], &here);

    let (host, port) = p.address.clone().unwrap();
    let nobody = RankId { pp: 0, tp: 7 };
    let reply = query(None, &host, port, None, vec![nobody], LONG).unwrap();
    let HandshakeReply::Refused { code: RefusalCode::UnknownRank, message, .. } = reply else { panic!("{reply:?}") };
    assert!(message.contains("tp 7") && message.contains("prefill"), "{message}");
    let wrong = query(None, &host, port, Some(EngineId::new("x").unwrap()), vec![], LONG).unwrap();
    assert!(matches!(wrong, HandshakeReply::Refused { code: RefusalCode::WrongEngine, .. }), "{wrong:?}");
    works(&mut p, &mut d, "next");
}

#[test]
fn what_does_not_fit_is_refused_with_both_values() {
    let cache = CacheSpec::small(1, 1, 22);
    let mut p = Engine::start("prefill", &cache, Transport::Tcp);
    let here = lists(1, 3, false);
    let good = p.prefill("good", &lists(5, 3, false), 12);
    let change = |w: &mut WorkerConfig| w.compat[1].value = "float16".into();
    let mut d = Engine::start_with("decode", &cache, Transport::Tcp, change, |_| {});
    d.load("dtype", &good, &here, 12);
    let said = d.await_received("dtype");
    assert_failed(&said, 1, Cause::Incompatible, &["dtype", "float16", "bfloat16"], &here);
    drop(d);

    let mut wide = cache.clone();
    wide.model.groups[0].parts[0].bytes *= 2;
    let mut d = Engine::start("decode", &wide, Transport::Tcp);
    d.load("content", &good, &here, 12);
    let said = d.await_received("content");
    assert_failed(&said, 1, Cause::Incompatible, &["bytes per token", "24", "48"], &here);
    drop(d);

    let mut d = Engine::start("decode", &CacheSpec::small(2, 1, 22), Transport::Tcp);
    d.load("shape", &good, &here, 12);
    let said = d.await_received("shape");
    assert_failed(
        &said,
        2,
        Cause::Incompatible,
        &["number of KV heads of the model", "4 here", "2 on the other side"],
        &here,
    );
}

#[test]
fn params_without_a_needed_key_are_an_error_that_names_it() {
    let cache = CacheSpec::small(1, 1, 23);
    let (mut p, mut d) = pair(&cache);
    let good = p.prefill("good", &lists(5, 3, false), 12);
    type Change = fn(&mut TransferParams);
    let changes: [(&str, Change); 4] = [
        ("remote_engine_id", |p| p.remote_engine_id = None),
        ("remote_request_id", |p| p.remote_request_id = None),
        ("remote_host", |p| p.remote_host = None),
        ("remote_port", |p| p.remote_port = Some(70_000)),
    ];
    for (key, change) in changes {
        let mut params = good.clone();
        change(&mut params);
        for error in [
            d.scheduler.arrived("r", &params).unwrap_err(),
            d.scheduler.matched("r", &params, 12, 0).unwrap_err(),
            d.scheduler.allocated("r", &params, blocks(&lists(1, 3, false)), 12, 12).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(key), "{error}");
        }
    }
    assert!(!d.scheduler.has_pending());
    let no_blocks = TransferParams { remote_block_ids: None, ..good.clone() };
    let error = d.scheduler.matched("r", &no_blocks, 12, 0).unwrap_err();
    assert!(error.message().contains("remote_block_ids"), "{error}");
    works(&mut p, &mut d, "next");
}

#[test]
fn a_lease_that_ran_out_is_a_failure() {
    let cache = CacheSpec::small(2, 1, 24);
    let (mut p, mut d) = pair(&cache);
    let here = lists(1, 3, false);
    let params = p.prefill_for("p", &lists(5, 3, false), 12, 100);
    // Nobody renews it: P frees the blocks.
    p.await_sent("p");
    assert_eq!(p.stats.sends_expired, 2);
    // It computes another prompt in them: this is what D reads, and must not take for its own.
    for worker in &mut p.workers {
        worker.ok(&Ask::Fill { request: "another".into(), blocks: lists(5, 3, false) });
    }
    d.load("d", &params, &here, 12);
    let said = d.await_received("d");
    assert_failed(&said, 2, Cause::LeaseExpired, &["lease"], &here);
    works_beside(&mut p, &mut d, "next", &[("another", &here)]);
}

#[test]
fn a_hold_keeps_the_lease_and_a_release_gives_it_back() {
    let cache = CacheSpec::small(2, 1, 25);
    let (mut p, mut d) = pair(&cache);
    // A machine that stands still for longer than a lease ends it: then the next one is longer.
    let before = (0..6)
        .find_map(|attempt| {
            let (name, lease_ms) = (format!("p-{attempt}"), 1_000 << attempt);
            let params = p.prefill_for(&name, &lists(5, 3, false), 12, lease_ms);
            d.scheduler.arrived(&name, &params).unwrap();
            d.step();
            // D's engine makes no step; its progress threads renew.
            let (start, before) = (Instant::now(), p.stats.clone());
            let held = |p: &Engine| {
                start.elapsed() > 2 * Duration::from_millis(lease_ms) && p.stats.renewals >= before.renewals + 2 * 12
            };
            p.until("heartbeats for twice the lease", |p| held(p) || !p.said(&name).sent.is_empty());
            // The request is never scheduled: its producer gets the blocks back at once.
            let finish = d.scheduler.finished(&name, &params, FinishOutcome::Aborted, vec![], 0).unwrap();
            assert!(!finish.keep);
            d.step();
            p.await_sent(&name);
            (p.stats.sends_expired == before.sends_expired).then_some(before)
        })
        .expect("a lease that holds");
    assert_eq!((p.stats.sends_released, p.stats.sends_expired), (before.sends_released + 2, before.sends_expired));
    // One that no worker ever heard of is given back just so.
    let params = p.prefill("unheard", &lists(5, 3, false), 12);
    d.scheduler.finished("unheard-d", &params, FinishOutcome::Aborted, vec![], 0).unwrap();
    d.step();
    p.await_sent("unheard");
    assert_eq!((p.stats.sends_released, p.stats.sends_expired), (before.sends_released + 4, before.sends_expired));
    works(&mut p, &mut d, "next");
}

/// P is stopped, so that the reads cannot complete, and then killed under them.
fn killed_mid_transfer(transport: Transport) {
    let cache = CacheSpec::small(1, 1, 26);
    let mut p = Engine::start("prefill", &cache, transport);
    let mut d = Engine::start("decode", &CacheSpec { seed: 1026, ..cache.clone() }, transport);
    works(&mut p, &mut d, "before");
    let here = lists(1, 6, false);
    let params = p.prefill("p", &lists(5, 6, false), 24);
    p.workers[0].signal(Signal::STOP);
    d.load("d", &params, &here, 24);
    d.until_stats("a load under way", |loads, _, _| loads == 1);
    p.workers[0].kill();
    let said = d.await_received("d");
    assert_failed(&said, 1, Cause::PeerDied, &["prefill"], &here);

    // The same engine starts again, on another port and with other memory: the next request works.
    p.workers.clear();
    p.scheduler.shutdown();
    let mut p = Engine::start("prefill", &cache, transport);
    d.load("stale", &params, &here, 24);
    let said = d.await_received("stale");
    assert_failed(&said, 1, Cause::HandshakeFailed, &["127.0.0.1"], &here);
    let mut moved = params.clone();
    moved.remote_port = p.address.as_ref().map(|(_, port)| i64::from(*port));
    d.load("earlier-life", &moved, &here, 24);
    let said = d.await_received("earlier-life");
    assert_failed(&said, 1, Cause::PeerDied, &["restarted"], &here);
    let params = p.prefill("p", &lists(5, 6, true), 24);
    let there = lists(10, 6, true);
    d.load("again", &params, &there, 24);
    let said = d.await_received("again");
    assert!(said.failures.is_empty(), "{said:#?}");
    p.await_sent("p");
}

#[test]
fn a_producer_killed_mid_transfer_over_tcp() {
    killed_mid_transfer(Transport::Tcp);
}

#[test]
fn a_producer_killed_mid_transfer_over_shm() {
    killed_mid_transfer(Transport::Shm);
}

/// The producer must outlive its consumers: one dies while the producer has its reads still to serve.
fn consumer_killed_mid_transfer(transport: Transport) {
    let cache = CacheSpec::small(1, 1, 31);
    let mut p = Engine::start("prefill", &cache, transport);
    let mut d = Engine::start("decode", &CacheSpec { seed: 1031, ..cache.clone() }, transport);
    works(&mut p, &mut d, "before");
    let params = p.prefill_for("p", &lists(5, 6, false), 24, 1_000);
    p.workers[0].signal(Signal::STOP);
    d.load("d", &params, &lists(1, 6, true), 24);
    d.until_stats("a load under way", |loads, _, _| loads == 1);
    d.workers[0].kill();
    d.workers.clear();
    p.workers[0].signal(Signal::CONT);
    // Nobody renews the lease.
    p.await_sent("p");
    match transport {
        // CMA reads need nothing of the stopped producer, so the consumer may have said done before it died.
        Transport::Shm => assert_eq!(p.stats.sends_expired + p.stats.sends_read, 2),
        _ => assert_eq!((p.stats.sends_expired, p.stats.sends_read), (1, 1)),
    }
    let mut d = Engine::start("decode", &CacheSpec { seed: 1032, ..cache.clone() }, transport);
    works(&mut p, &mut d, "next");
}

#[test]
fn a_consumer_killed_mid_transfer_over_tcp() {
    consumer_killed_mid_transfer(Transport::Tcp);
}

#[test]
fn a_consumer_killed_mid_transfer_over_shm() {
    consumer_killed_mid_transfer(Transport::Shm);
}

#[test]
fn an_abort_ends_a_load_with_one_report() {
    let cache = CacheSpec::small(1, 1, 27);
    let (mut p, mut d) = pair(&cache);
    works(&mut p, &mut d, "before");
    let (there, here) = (lists(5, 3, false), lists(1, 3, false));
    let params = p.prefill("p", &there, 12);
    // P cannot answer while it is stopped: the load is under way when it is aborted.
    p.workers[0].signal(Signal::STOP);
    d.load("d", &params, &here, 12);
    d.until_stats("a load under way", |loads, _, _| loads == 1);
    let finish = d.scheduler.finished("d", &params, FinishOutcome::Aborted, blocks(&here), 12).unwrap();
    assert!(finish.keep, "the blocks may still be written");
    d.step();
    p.workers[0].signal(Signal::CONT);
    let said = d.await_received("d");
    assert!(said.failures.values().all(|f| f.cause == Cause::Aborted), "{said:#?}");
    p.await_sent("p");
    d.until_stats("no load", |loads, _, transfers| loads == 0 && transfers == 0);
}

#[test]
fn malformed_steps_and_block_ids_cost_only_themselves() {
    let cache = CacheSpec::small(1, 1, 28);
    let (mut p, mut d) = pair(&cache);
    let good = p.prefill("good", &lists(5, 3, false), 12);
    for (bytes, kind) in [
        (vec![], ErrorKind::Corrupt),
        (vec![0xc1; 4000], ErrorKind::Corrupt),
        (b"{\"json\": true}".to_vec(), ErrorKind::Corrupt),
    ] {
        let Tell::Error { kind: got, message } = d.workers[0].ask(&Ask::Submit { step: bytes }) else {
            panic!("a malformed step was taken")
        };
        assert_eq!(got, kind.code(), "{message}");
    }
    // Well-formed msgpack of the right kind whose body is something else, long enough to be decoded off-thread.
    let odd = kvferry::proto::wire::encode(
        StepMetadata::KIND,
        StepMetadata::OLDEST,
        &std::collections::BTreeMap::from([("loads", "x".repeat(500))]),
    );
    d.workers[0].ok(&Ask::Submit { step: odd.unwrap() });
    let far = TransferParams { remote_block_ids: Some(vec![vec![5, 6, 7_000_000], vec![1, 2, 3, 4]]), ..good.clone() };
    let here = lists(1, 3, false);
    d.scheduler.allocated("far", &far, blocks(&here), 12, 12).unwrap();
    d.step();
    let said = d.await_received("far");
    assert_failed(&said, 1, Cause::InvalidRequest, &["7000000"], &here);
    let Tell::Stats { malformed_steps, .. } = d.workers[0].ok(&Ask::Stats) else { panic!("no stats") };
    assert_eq!(malformed_steps, 1);
    works(&mut p, &mut d, "next");
}

#[test]
fn a_shut_down_worker_reports_every_load_and_takes_no_more() {
    let cache = CacheSpec::small(1, 1, 29);
    let (mut p, mut d) = pair(&cache);
    works(&mut p, &mut d, "before");
    let here = lists(1, 3, false);
    let params = p.prefill("p", &lists(5, 3, false), 12);
    p.workers[0].signal(Signal::STOP);
    d.load("d", &params, &here, 12);
    d.until_stats("a load under way", |loads, _, _| loads == 1);
    d.workers[0].ok(&Ask::ShutDownWorker);
    let said = d.await_received("d");
    assert_failed(&said, 1, Cause::ShutDown, &[], &here);
    p.workers[0].signal(Signal::CONT);
    let Tell::Error { kind, .. } = d.workers[0].ask(&Ask::Submit { step: vec![] }) else { panic!("it took a step") };
    assert_eq!(kind, ErrorKind::ShutDown.code());
}

#[test]
fn metadata_and_configuration_are_checked_at_the_door() {
    let cache = CacheSpec::small(2, 1, 30);
    let mut p = Engine::start_cold("prefill", &cache, Transport::Tcp, |_| {}, |_| {});
    let good = p.complete();
    let error = p.scheduler.serve(good[..1].to_vec()).unwrap_err();
    assert!(error.message().contains("(pp 0, tp 1)"), "{error}");
    let swapped = vec![(good[1].0, good[0].1.clone())];
    let error = p.scheduler.serve(swapped).unwrap_err();
    assert!(error.message().contains("given as that of rank (pp 0, tp 1)"), "{error}");
    assert_eq!(p.scheduler.serve(vec![(good[0].0, vec![1, 2, 3])]).unwrap_err().kind(), ErrorKind::Corrupt);
    let (host, port) = p.scheduler.serve(good.clone()).unwrap();
    assert_eq!(p.scheduler.serve(good.clone()).unwrap(), (host, port));

    // Another engine's scheduler side on the same port; another engine's metadata; pushes that nobody asked for.
    let mut taken = scheduler_config("other", &cache);
    taken.port = port;
    let other = Scheduler::start(taken).unwrap();
    let error = other.serve(good).unwrap_err();
    assert!(error.message().contains("other") && error.message().contains("prefill"), "{error}");
    let mut taken = scheduler_config("other", &cache);
    (taken.port, taken.push) = (port - 1, true);
    taken.data_parallel_index = 1;
    let error = Scheduler::start(taken).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::AddressInUse);
    assert!(error.message().contains(&port.to_string()), "{error}");
    let push = Ask::Push { host: "127.0.0.1".into(), port, expected: 2, ms: 60_000 };
    let Tell::Error { message, .. } = p.workers[0].ask(&push) else { panic!("a push was taken") };
    assert!(message.contains("takes no pushes"), "{message}");

    // The cache cannot be changed once it is stated.
    let again = Ask::Complete { cache: cache.clone() };
    let Tell::Error { message, .. } = p.workers[0].ask(&again) else { panic!("a late region was taken") };
    assert!(message.contains("set_geometry"), "{message}");
}
