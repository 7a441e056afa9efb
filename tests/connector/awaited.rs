//! Loads that come before their prefill is over: real engines, UCX and ZMQ, every byte checked.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::cache::CacheSpec;
use crate::common::child::{Ask, LONG, Tell};
use crate::common::engine::{Engine, blocks, lists};
use crate::common::keys::key_file;
use kvferry::connector::Transport;
use kvferry::proto::scheduler::FinishOutcome;
use kvferry::proto::wire::{Cause, TransferParams};

/// The bytes of a prefill that has ended are written after its answer is out, as a GPU writes a draft's cache: the blocks
/// hold something else until the workers have the grant.
#[test]
fn what_is_written_late_is_read_when_it_is_there() {
    let (p_cache, d_cache) = (CacheSpec::small(2, 1, 1), CacheSpec::small(2, 1, 2));
    let mut p = Engine::start_with("prefill", &p_cache, Transport::Tcp, |_| {}, |s| s.written_late = true);
    let mut d = Engine::start("decode", &d_cache, Transport::Tcp);
    let asked = TransferParams { do_remote_decode: true, ..TransferParams::default() };
    let (there, here) = (lists(1, 5, false), lists(30, 5, true));
    // The second over connections that are there, so that nothing else takes time.
    for round in 0..2 {
        let (name, load) = (format!("p-{round}"), format!("d-{round}"));
        let finish = p.scheduler.finished(&name, &asked, FinishOutcome::Complete, blocks(&there), 20).unwrap();
        d.load(&load, &finish.params.unwrap(), &here, 20);
        d.until_stats("the load, which waits", |loads, _, _| loads == 1);
        std::thread::sleep(Duration::from_millis(300));
        d.step();
        assert!(d.said(&load).received.is_empty(), "{:#?}", d.said(&load));
        for worker in &mut p.workers {
            worker.ok(&Ask::Fill { request: name.clone(), blocks: there.clone() });
        }
        p.step();
        // Its report is what tells those who await it.
        p.until("the grant", |e| e.said(&name).granted.len() == 2);
        assert!(d.await_received(&load).failures.is_empty(), "{:#?}", d.said(&load));
        p.await_sent(&name);
        d.check(&[(&name, &here)]);
    }
}

/// Loads before, while and after their prefills end, and prefills that end without a hand-over.
fn loads_wait(tp: u32, pp: u32, transport: Transport, is_keyed: bool) {
    let key = if is_keyed { key_file(0x5a) } else { PathBuf::new() };
    let p_cache = CacheSpec::small(tp, pp, 1);
    let d_cache = CacheSpec::small(tp, pp, 2);
    let start = |name: &str, cache: &CacheSpec| {
        let key = || Some(key.clone());
        Engine::start_with(name, cache, transport, |w| w.agent.key_file = key(), |s| s.key_file = key())
    };
    let (mut p, mut d) = (start("prefill", &p_cache), start("decode", &d_cache));

    // (the producer's first block, ours, blocks of 4 tokens)
    let wanted = [(1u32, 30u32, 5u32), (12, 2, 1), (20, 8, 6), (31, 20, 8)];
    let mut loads = Vec::new();
    for (index, (_, ours, len)) in wanted.iter().enumerate().take(3) {
        let here = lists(*ours, *len, index == 2);
        d.load(&format!("d-{index}"), &p.announce(&format!("x-{index}")), &here, u64::from(*len) * 4);
        loads.push((format!("p-{index}"), here));
    }
    // Connected, and nothing is over.
    d.until_stats("connections while it waits", |loads, _, _| loads == 3);
    // The last first. The others' loads go on waiting.
    let prefill = |p: &mut Engine, index: usize| {
        let (theirs, _, len) = wanted[index];
        let there = lists(theirs, len, index == 1);
        p.complete_announced(&format!("p-{index}"), &format!("x-{index}"), &there, u64::from(len) * 4);
    };
    prefill(&mut p, 2);
    assert!(d.await_received("d-2").failures.is_empty(), "{:#?}", d.said("d-2"));
    p.await_sent("p-2");
    assert!(d.said("d-0").received.is_empty() && d.said("d-1").received.is_empty());
    // Two at once, one of which is aborted; and one that is over before it is wanted.
    prefill(&mut p, 0);
    let asked = TransferParams { do_remote_decode: true, transfer_id: Some("x-1".into()), ..TransferParams::default() };
    p.scheduler.finished("p-1", &asked, FinishOutcome::Aborted, blocks(&lists(1, 1, false)), 4).unwrap();
    p.step();
    prefill(&mut p, 3);
    let (_, ours, len) = wanted[3];
    loads.push(("p-3".into(), lists(ours, len, false)));
    d.load("d-3", &p.announce("x-3"), &loads[3].1, u64::from(len) * 4);
    for good in ["d-0", "d-3"] {
        assert!(d.await_received(good).failures.is_empty(), "{:#?}", d.said(good));
    }
    p.await_sent("p-0");
    p.await_sent("p-3");
    let said = d.await_received("d-1");
    assert_eq!(said.failures.len(), (tp * pp) as usize, "{said:#?}");
    assert!(said.failures.values().all(|failure| failure.cause == Cause::LeaseExpired), "{said:#?}");
    loads.remove(1);
    let loads: Vec<_> = loads.iter().map(|(name, lists)| (name.as_str(), lists)).collect();
    d.check(&loads);
}

#[test]
fn four_ranks_over_tcp() {
    loads_wait(2, 2, Transport::Tcp, false);
}

#[test]
fn one_rank_over_shm() {
    loads_wait(1, 1, Transport::Shm, false);
}

#[test]
fn two_ranks_with_a_key() {
    loads_wait(2, 1, Transport::Tcp, true);
}

/// Aborted while it waits: reported at once; the prefill that ends later is given back.
#[test]
fn an_abort_ends_the_wait() {
    let cache = CacheSpec::small(2, 1, 1);
    let mut p = Engine::start("prefill", &cache, Transport::Tcp);
    let mut d = Engine::start("decode", &CacheSpec { seed: 2, ..cache.clone() }, Transport::Tcp);
    d.load("d", &p.announce("x"), &lists(3, 4, false), 16);
    d.until_stats("the load", |loads, _, _| loads == 1);
    let gone = d.scheduler.finished("d", &p.announce("x"), FinishOutcome::Aborted, vec![], 0).unwrap();
    assert!(gone.keep, "its blocks stay until its report");
    d.step();
    let said = d.await_received("d");
    assert!(said.failures.values().all(|failure| failure.cause == Cause::Aborted), "{said:#?}");
    p.complete_announced("p", "x", &lists(9, 4, false), 16);
    p.await_sent("p");
}

/// Another engine at the same place, and an engine that dies.
#[test]
fn what_cannot_be_awaited_fails_with_its_cause() {
    let cache = CacheSpec::small(1, 1, 1);
    let mut p = Engine::start("prefill", &cache, Transport::Tcp);
    let mut d = Engine::start("decode", &CacheSpec { seed: 2, ..cache.clone() }, Transport::Tcp);
    let other = TransferParams { remote_engine_id: Some("another".into()), ..p.announce("x") };
    d.load("wrong", &other, &lists(3, 4, false), 16);
    let said = d.await_received("wrong");
    let failure = said.failures.values().next().expect("a failure");
    assert_eq!(failure.cause, Cause::HandshakeFailed);
    assert!(failure.message.contains("\"prefill\" listens here"), "{}", failure.message);

    d.load("orphan", &p.announce("y"), &lists(3, 4, false), 16);
    let start = Instant::now();
    while !matches!(d.workers[0].ok(&Ask::Stats), Tell::Stats { loads: 1, peers: 1, .. }) {
        assert!(start.elapsed() < LONG, "waiting for a connection");
        std::thread::sleep(Duration::from_millis(5));
    }
    p.workers[0].kill();
    let said = d.await_received("orphan");
    assert_eq!(said.failures.values().next().expect("a failure").cause, Cause::PeerDied, "{said:#?}");
}
