//! Whole engines: worker processes of both sides, scheduler sides, real UCX and ZMQ, every byte checked.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::Duration;

use common::cache::{CacheSpec, Loaded};
use common::child::{Ask, LONG, Tell, serve_if_child};
use common::engine::{Engine, lists};
use kvferry::connector::Transport;
use kvferry::net::query_blocking;
use kvferry::proto::shape::Parts;
use kvferry::proto::wire::HandshakeReply;

/// The other processes of these tests.
#[test]
fn child() {
    serve_if_child();
}

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
    let per_rank = |rank: &mut common::child::Child| match rank.ok(&Ask::Stats) {
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
    let Ok(HandshakeReply::Ranks { ranks, .. }) = query_blocking(&host, port, None, vec![], LONG) else {
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
    let refused = query_blocking(&host, port, None, vec![], Duration::from_millis(200)).unwrap();
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
    d.scheduler.allocated("d", &params, common::engine::blocks(&here), 32, 24).unwrap();
    d.step();
    assert!(d.await_received("d").failures.is_empty());
    p.await_sent("p");
    // Two blocks of 4 tokens at the front came from elsewhere.
    here[0].splice(..0, [0, 0]);
    d.check(&[("p", &here)]);
}

#[test]
fn the_request_log_has_a_line_per_receive() {
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
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let mut lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    lines.sort_by_key(|l| l["tp_rank"].as_u64());
    assert_eq!(lines.len(), 2);
    for (rank, line) in lines.iter().enumerate() {
        assert_eq!(line["request_id"], "d-1");
        assert_eq!(line["remote_request_id"], "p \"1\"");
        assert_eq!(line["tp_rank"].as_u64(), Some(rank as u64));
        assert_eq!(line["pp_rank"], 0);
        assert_eq!(line["blocks"], 2 + 3);
        assert!(line["bytes"].as_u64().unwrap() > 0 && line["operations"].as_u64().unwrap() > 0);
        assert!(line["cause"].is_null() && line["transfer_ms"].as_f64().unwrap() >= 0.0);
    }
}

/// Ten seconds of nothing to do, with connections to another engine, cost next to no processor time.
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
    std::thread::sleep(Duration::from_secs(10));
    let after = [p.workers[0].cpu(), d.workers[0].cpu()];
    for (before, after) in before.iter().zip(after) {
        let used = after - *before;
        println!("an idle worker used {used:?} of 10 s");
        // The test's own watchdog wakes twice a second; an agent that spins would use seconds.
        assert!(used < Duration::from_millis(50), "an idle worker used {used:?} in 10 s");
    }
}
