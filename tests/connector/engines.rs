//! Whole engines: worker processes of both sides, scheduler sides, real UCX and ZMQ, every byte checked.

use std::time::Duration;

use crate::common::cache::{CacheSpec, Loaded};
use crate::common::child::{Ask, LONG, Lists, Tell};
use crate::common::engine::{Engine, lists, scheduler_config};
use kvferry::connector::Transport;
use kvferry::net::query;
use kvferry::proto::scheduler::FinishOutcome;
use kvferry::proto::shape::Parts;
use kvferry::proto::wire::{Cause, HandshakeReply, TransferParams};

/// Several requests at once between two engines of this shape, then more over the connections that exist.
fn requests_arrive(tp: u32, pp: u32, transport: Transport) {
    let p_cache = CacheSpec::small(tp, pp, 1);
    // Another number of blocks, and gaps between them that must stay as they are.
    let mut d_cache = CacheSpec::small(tp, pp, 2);
    (d_cache.engine.num_blocks, d_cache.engine.gap, d_cache.engine.parts) = (56, 40, Parts::Packed);
    let mut p = Engine::start("prefill", &p_cache, transport);
    let mut d = Engine::start("decode", &d_cache, transport);
    let all = (tp * pp) as usize;

    // (request, the producer's first block, ours, blocks of 4 tokens)
    let wanted = [("r0", 1u32, 30u32, 5u32), ("r1", 12, 2, 1), ("r2", 20, 10, 9), ("r3", 31, 40, 8)];
    let mut brought = Vec::new();
    for round in 0..2 {
        let mut names = Vec::new();
        for (index, (name, theirs, ours, len)) in wanted.iter().enumerate() {
            // The second round lands beside the first: ids shift by one, and other requests fill them.
            let (p_name, d_name) = (format!("p-{name}-{round}"), format!("d-{name}-{round}"));
            let there = lists(*theirs, *len, index % 2 == 1);
            let here = lists(*ours, *len, index >= 2);
            let params = p.prefill(&p_name, &there, u64::from(*len) * 4);
            d.load(&d_name, &params, &here, u64::from(*len) * 4);
            names.push((p_name, d_name));
            if round == 1 {
                brought.remove(0);
            }
            brought.push((names[index].0.clone(), here));
        }
        for (p_name, d_name) in &names {
            let said = d.await_received(d_name);
            assert!(said.failures.is_empty(), "{said:#?}");
            p.await_sent(p_name);
        }
        let loads: Vec<_> = brought.iter().map(|(n, l)| (n.as_str(), l)).collect();
        d.check(&loads);
    }
    let per_rank = |rank: &mut crate::common::child::Child| match rank.ok(&Ask::Stats) {
        Tell::Stats { loads: 0, leases: 0, transfers: 0, totals_bytes, .. } => totals_bytes,
        other => panic!("something is left: {other:?}"),
    };
    // Two heads of two layers of 24 bytes each of K and V.
    let token = 2 * 2 * (24 + 24);
    let expected: u64 = 2 * wanted
        .iter()
        .map(|(_, _, _, len)| u64::from(*len) * 4 * token + u64::from((len * 2).min(3)) * 2 * token)
        .sum::<u64>();
    for worker in &mut d.workers {
        assert_eq!(per_rank(worker), expected);
    }
    assert_eq!(d.stats.recvs, (2 * wanted.len() * all) as u64);
    assert_eq!(d.stats.bytes, expected * all as u64);
    assert_eq!(p.stats.sends_read, (2 * wanted.len() * all) as u64);
    assert!(d.stats.recv_failures.is_empty());
    assert_eq!((p.scheduler.has_pending(), d.scheduler.has_pending()), (false, false));
    // The listener serves the ranks, whole and one by one.
    let (host, port) = p.address.clone().unwrap();
    let Ok(HandshakeReply::Ranks { ranks, .. }) = query(None, &host, port, None, vec![], LONG) else {
        panic!("no ranks")
    };
    assert_eq!(ranks.len(), all);
}

#[test]
fn tp2_pp2_over_tcp() {
    requests_arrive(2, 2, Transport::Tcp);
}

#[test]
fn tp2_pp2_over_shm() {
    requests_arrive(2, 2, Transport::Shm);
}

#[test]
fn one_rank_over_what_ucx_chooses() {
    requests_arrive(1, 1, Transport::Auto);
}

/// The first request arrives while the producer's ranks are not complete: the consumer asks again until they are.
#[test]
fn a_cold_start_needs_no_warm_up() {
    let cache = CacheSpec::small(2, 1, 3);
    let mut d = Engine::start("decode", &CacheSpec { seed: 4, ..cache.clone() }, Transport::Tcp);
    let mut p = Engine::start_cold("prefill", &cache, Transport::Tcp, |_| {}, |s| s.push = true);
    let (host, port) = p.scheduler.address().unwrap();
    let expected = p.workers.len() as u32;
    let push = Ask::Push { host: host.clone(), port, expected, ms: LONG.as_millis() as u64 };

    // One rank is there, the other is not. The listener's address is known, so a hand-over can be offered.
    let one = Ask::Complete { cache: cache.clone() };
    p.workers[0].ok(&one);
    assert_eq!(p.workers[0].ok(&push), Tell::Count(1));
    let here = lists(3, 4, false);
    let there = lists(7, 4, true);
    let params = p.finish_prefill("p", &there, 16);
    d.load("d", &params, &here, 16);
    // The refusal is the answer when the time is up, which is longer where a busy machine takes longer to ask.
    let limits = (0..9).map(|doubled| Duration::from_millis(200 << doubled));
    let refused = limits.map(|limit| query(None, &host, port, None, vec![], limit)).find_map(Result::ok).unwrap();
    assert!(matches!(&refused, HandshakeReply::Refused { .. }), "{refused:?}");

    p.workers[1].ok(&one);
    for worker in &mut p.workers {
        worker.ok(&Ask::Fill { request: "p".into(), blocks: there.clone() });
    }
    assert_eq!(p.workers[1].ok(&push), Tell::Count(0));
    // Pushed once more: nothing changes.
    assert_eq!(p.workers[0].ok(&push), Tell::Count(0));
    let said = d.await_received("d");
    assert!(said.failures.is_empty(), "{said:#?}");
    p.await_sent("p");
    d.check(&[("p", &here)]);
}

/// Engines that hand over in both directions use one connection each way or both ways; either works.
#[test]
fn both_engines_may_be_producer_and_consumer() {
    let cache = CacheSpec::small(1, 1, 5);
    let mut a = Engine::start("a", &cache, Transport::Tcp);
    let mut b = Engine::start("b", &CacheSpec { seed: 6, ..cache.clone() }, Transport::Tcp);
    let mut at_a: Vec<Loaded> = vec![];
    let mut at_b: Vec<Loaded> = vec![];
    for round in 0..3u32 {
        let first = 1 + round * 12;
        let (a_has, a_gets) = (lists(first, 3, false), lists(first + 6, 3, true));
        let (b_has, b_gets) = (lists(first + 6, 3, true), lists(first, 3, false));
        let to_b = a.prefill(&format!("a{round}"), &a_has, 12);
        let to_a = b.prefill(&format!("b{round}"), &b_has, 12);
        at_a.push(Loaded::whole(&format!("a{round}"), &a_has));
        at_b.push(Loaded::whole(&format!("b{round}"), &b_has));
        b.load(&format!("at-b{round}"), &to_b, &b_gets, 12);
        a.load(&format!("at-a{round}"), &to_a, &a_gets, 12);
        at_b.push(Loaded::whole(&format!("a{round}"), &b_gets));
        at_a.push(Loaded::whole(&format!("b{round}"), &a_gets));
        assert!(b.await_received(&format!("at-b{round}")).failures.is_empty());
        assert!(a.await_received(&format!("at-a{round}")).failures.is_empty());
        a.await_sent(&format!("a{round}"));
        b.await_sent(&format!("b{round}"));
    }
    a.workers[0].check(&at_a);
    b.workers[0].check(&at_b);
}

/// A part of the prompt is there already: only the rest is read.
#[test]
fn a_local_prefix_is_not_loaded() {
    let cache = CacheSpec::small(1, 2, 7);
    let mut p = Engine::start("prefill", &cache, Transport::Shm);
    let mut d = Engine::start("decode", &CacheSpec { seed: 8, ..cache.clone() }, Transport::Shm);
    let there = lists(1, 8, true);
    let params = p.prefill("p", &there, 32);
    d.scheduler.arrived("d", &params).unwrap();
    assert_eq!(d.scheduler.matched("d", &params, 32, 8).unwrap().tokens, 24);
    let mut here = lists(20, 8, false);
    here[0].drain(..2);
    d.scheduler.allocated("d", &params, crate::common::engine::blocks(&here), 32, 24).unwrap();
    d.step();
    assert!(d.await_received("d").failures.is_empty());
    p.await_sent("p");
    // Two blocks of 4 tokens at the front came from elsewhere.
    here[0].splice(..0, [0, 0]);
    d.check(&[("p", &here)]);
}

/// By the former name of its setting, too.
#[test]
fn a_trace_has_what_there_is_to_know_of_each_receive() {
    let folder = std::env::temp_dir().join(format!("kvferry-connector-log-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("requests.jsonl");
    let cache = CacheSpec::small(2, 1, 9);
    let mut p = Engine::start("prefill", &cache, Transport::Tcp);
    let log = path.to_str().unwrap().to_owned();
    let mut d = Engine::start_with("decode", &cache, Transport::Tcp, |w| w.request_log = Some(log.clone()), |_| {});
    let there = lists(1, 2, false);
    let params = p.prefill("p \"1\"", &there, 8);
    d.load("d-1", &params, &there, 8);
    assert!(d.await_received("d-1").failures.is_empty());
    drop(d);
    let mut ranks = Vec::new();
    for path in [path.clone(), folder.join("requests.2.jsonl")] {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.strip_prefix("[\n").unwrap().lines().map(|line| line.strip_suffix(',').unwrap());
        let events: Vec<serde_json::Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
        let source = events.iter().find(|event| event["name"] == "kvferry").unwrap();
        assert_eq!(source["args"]["pp_rank"], 0);
        ranks.push(source["args"]["tp_rank"].as_u64().unwrap());
        let ended: Vec<_> = events.iter().filter(|event| event["args"]["outcome"].is_string()).collect();
        let [end] = ended[..] else { panic!("{} receives", ended.len()) };
        assert_eq!((&end["name"], &end["args"]["outcome"]), (&"d-1".into(), &"received".into()));
        let args = &end["args"];
        assert_eq!((&args["remote_request"], &args["blocks"]), (&"p \"1\"".into(), &(2 + 3).into()));
        assert!(args["bytes"].as_u64().unwrap() > 0 && args["operations"].as_u64().unwrap() > 0);
        let at = |what: &str| args[what].as_u64().unwrap();
        assert!(at("queued") <= at("posted") && at("posted") <= at("last_byte") && at("last_byte") <= at("confirmed"));
    }
    std::fs::remove_dir_all(&folder).unwrap();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1]);
}

/// Three seconds of nothing to do, with connections to another engine, cost next to no processor time.
#[test]
fn an_idle_worker_sleeps() {
    let cache = CacheSpec::small(1, 1, 10);
    let mut p = Engine::start("prefill", &cache, Transport::Tcp);
    let mut d = Engine::start("decode", &cache, Transport::Tcp);
    let there = lists(1, 2, false);
    let params = p.prefill("p", &there, 8);
    d.load("d", &params, &there, 8);
    assert!(d.await_received("d").failures.is_empty());
    p.await_sent("p");
    let Tell::Stats { peers, .. } = d.workers[0].ok(&Ask::Stats) else { panic!("no stats") };
    assert_eq!(peers, 1);
    let before = [p.workers[0].cpu(), d.workers[0].cpu()];
    std::thread::sleep(Duration::from_secs(3));
    let after = [p.workers[0].cpu(), d.workers[0].cpu()];
    for (before, after) in before.iter().zip(after) {
        let used = after - *before;
        println!("an idle worker used {used:?} of 3 s");
        // The test's own watchdog wakes twice a second; an agent that spins would use seconds.
        assert!(used < Duration::from_millis(15), "an idle worker used {used:?} in 3 s");
    }
}

/// Requests of one decode engine for one prefill, as vLLM makes of a request with `n` > 1: four at once, then four one after
/// another, between engines of unequal shapes. Every one has every byte, and the blocks are given back once.
#[test]
fn requests_for_one_prefill_all_load_it() {
    let (mut p_cache, mut d_cache) = (CacheSpec::small(2, 2, 50), CacheSpec::small(2, 2, 51));
    (p_cache.engine.pp, d_cache.engine.tp, d_cache.engine.num_blocks) = (1, 1, 80);
    let mut p = Engine::start("prefill", &p_cache, Transport::Tcp);
    let mut d = Engine::start("decode", &d_cache, Transport::Tcp);
    let there = lists(1, 6, true);
    for round in ["at-once", "in-turn"] {
        let params = TransferParams { shared: Some(true), ..p.prefill(&format!("p-{round}"), &there, 24) };
        let children: Vec<(String, Lists)> =
            (0..4).map(|k| (format!("{k}_{round}"), lists(1 + 12 * k, 6, k % 2 == 0))).collect();
        for (name, here) in &children {
            d.load(name, &params, here, 24);
            if round == "in-turn" {
                let said = d.await_received(name);
                assert!(said.failures.is_empty(), "{said:#?}");
            }
        }
        for (name, _) in &children {
            let said = d.await_received(name);
            assert!(said.failures.is_empty(), "{said:#?}");
        }
        // `Engine` refuses a second word of one rank.
        p.await_sent(&format!("p-{round}"));
        let prefill = format!("p-{round}");
        d.check(&children.iter().map(|(_, here)| (prefill.as_str(), here)).collect::<Vec<_>>());
    }
    assert_eq!((d.stats.recvs, p.stats.sends_read, p.stats.sends_expired), (8 * 2, 2 * 2, 0));
    d.until_stats("nothing under way", |loads, _, transfers| loads == 0 && transfers == 0);
    p.until_stats("no lease", |_, leases, _| leases == 0);
}

/// Who knows a lease's id may keep its blocks, so that nobody must be able to guess it.
#[test]
fn ids_of_leases_are_drawn_at_random() {
    let cache = CacheSpec::small(1, 1, 70);
    let start = || {
        let scheduler = kvferry::connector::Scheduler::start(scheduler_config("prefill", &cache)).unwrap();
        let metadata = Engine::start_cold("prefill", &cache, Transport::Tcp, |_| {}, |_| {}).complete();
        scheduler.serve(metadata).unwrap();
        scheduler
    };
    let mut ids = Vec::new();
    for scheduler in [start(), start()] {
        for n in 0..8 {
            let asked = TransferParams { do_remote_decode: true, ..TransferParams::default() };
            let blocks = crate::common::engine::blocks(&lists(1, 2, false));
            let finish = scheduler.finished(&format!("p{n}"), &asked, FinishOutcome::Complete, blocks, 8).unwrap();
            ids.push(finish.params.unwrap().remote_lease_id.unwrap());
        }
    }
    assert!(ids.iter().all(|id| (1..1 << 53).contains(id)), "{ids:?}");
    // Ids that count, or that two lives have in common, would be guessed. By chance one in 2^45 runs has a small one.
    ids.sort_unstable();
    ids.dedup();
    assert!(ids.len() == 16 && ids[0] > 16 && ids.windows(2).all(|pair| pair[1] - pair[0] > 1), "{ids:?}");
}

/// The producer is named by its address and by a name of the same host, in either order.
#[test]
fn one_engine_may_go_by_several_names() {
    for (seed, names) in [(60, ["localhost", "127.0.0.1"]), (62, ["127.0.0.1", "localhost"])] {
        for named in [true, false] {
            let cache = CacheSpec::small(2, 1, seed);
            let mut p = Engine::start("prefill", &cache, Transport::Tcp);
            let mut d = Engine::start("decode", &CacheSpec { seed: seed + 1, ..cache.clone() }, Transport::Tcp);
            let mut brought = Vec::new();
            for (k, host) in names.iter().chain(&names).enumerate() {
                let k = k as u32;
                let (there, here) = (lists(1 + 5 * k, 3, true), lists(31 - 5 * k, 3, false));
                let prefill = format!("p{k}");
                let mut params = p.prefill(&prefill, &there, 12);
                params.remote_host = Some((*host).into());
                if !named {
                    // As of a producer that does not say its life: only a handshake tells who answers by that name.
                    params.remote_incarnation = None;
                }
                d.load(&format!("d{k}"), &params, &here, 12);
                let said = d.await_received(&format!("d{k}"));
                assert!(said.failures.is_empty(), "by {host}: {said:#?}");
                p.await_sent(&prefill);
                brought.push((prefill, here));
            }
            d.check(&brought.iter().map(|(name, here)| (name.as_str(), here)).collect::<Vec<_>>());
            for worker in &mut d.workers {
                let Tell::Stats { peers, .. } = worker.ok(&Ask::Stats) else { panic!("no stats") };
                assert_eq!(peers, 1, "one connection to each rank that is read from");
            }
        }
    }
}

/// The listener starts anew on another port, in another life, while a request of its former one is held.
#[test]
fn a_listener_that_moved_takes_nothing_from_the_next_requests() {
    let cache = CacheSpec::small(2, 1, 66);
    let mut p = Engine::start("prefill", &cache, Transport::Tcp);
    let mut d = Engine::start("decode", &CacheSpec { seed: 67, ..cache.clone() }, Transport::Tcp);
    let (there, here) = (lists(1, 3, true), lists(20, 3, false));
    let old = p.prefill("old", &there, 12);
    d.scheduler.arrived("held", &old).unwrap();
    d.step();
    p.until("heartbeats", |p| p.stats.renewals >= 2);
    p.scheduler.shutdown();
    p.scheduler = kvferry::connector::Scheduler::start(scheduler_config("prefill", &cache)).unwrap();
    let metadata: Vec<_> = p.workers.iter_mut().map(|w| (w.rank, w.bytes(&Ask::Metadata))).collect();
    let moved = p.scheduler.serve(metadata).unwrap();
    assert_ne!(Some(moved.1.into()), old.remote_port);
    for k in 0..2u32 {
        let (name, there, here) = (format!("new{k}"), lists(8 + 6 * k, 3, true), lists(1 + 6 * k, 3, false));
        let params = p.prefill(&name, &there, 12);
        d.load(&name, &params, &here, 12);
        let said = d.await_received(&name);
        assert!(said.failures.is_empty(), "{said:#?}");
        p.await_sent(&name);
    }
    d.check(&[("new0", &lists(1, 3, false)), ("new1", &lists(7, 3, false))]);
    // Its lease was another life's: a clean error that names the listener, and nobody waits.
    let params = TransferParams { remote_block_ids: old.remote_block_ids.clone(), ..old };
    d.scheduler.allocated("held", &params, crate::common::engine::blocks(&here), 12, 12).unwrap();
    d.step();
    let said = d.await_received("held");
    for failure in said.failures.values() {
        assert_eq!(failure.cause, Cause::HandshakeFailed, "{}", failure.message);
    }
    assert_eq!(said.failures.len(), 2);
    d.until_stats("nothing under way", |loads, _, transfers| loads == 0 && transfers == 0);
}

/// What a worker's gauges add up to over its reports: what there is, and after its end nothing.
#[test]
fn gauges_add_up_to_nothing_when_a_worker_is_suspended() {
    let cache = CacheSpec::small(1, 1, 7);
    let mut p = Engine::start("prefill", &cache, Transport::Tcp);
    let mut d = Engine::start("decode", &cache, Transport::Tcp);
    let there = lists(1, 3, false);
    let params = p.prefill("p-1", &there, 12);
    d.load("d-1", &params, &there, 12);
    assert!(d.await_received("d-1").failures.is_empty());
    p.await_sent("p-1");
    // One that nobody reads, and one that waits.
    let waits = p.prefill("p-2", &there, 12);
    d.scheduler.arrived("d-2", &waits).unwrap();
    d.step();
    p.until("its gauges", |p| p.stats.leases == 1 && p.stats.peers == 1 && p.stats.registered_bytes > 0);
    d.until("its gauges", |d| d.stats.peers == 1 && d.stats.endpoints == 1 && d.stats.registered_bytes > 0);
    for engine in [&mut d, &mut p] {
        engine.workers[0].ok(&Ask::SuspendWorker);
        engine.until("its last report", |e| e.stats.registered_bytes == 0);
        let stats = &engine.stats;
        assert_eq!((stats.leases, stats.peers, stats.endpoints, stats.registered_bytes), (0, 0, 0, 0));
        // No other comes.
        assert!(engine.workers[0].report(100).is_none());
    }
}
