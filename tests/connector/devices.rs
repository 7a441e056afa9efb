//! Hosts with network devices that lead nowhere, as network namespaces: which ones an agent uses, and what it says.

use crate::common::cache::{CacheSpec, Loaded};
use crate::common::child::{Ask, Child, LONG, Lists, Tell};
use crate::common::engine::{lists, scheduler_config, worker_config};
use crate::common::netns::Hosts;
use crate::common::skip::skip;
use kvferry::connector::{Scheduler, SchedulerConfig, Transport};
use kvferry::proto::ids::RankId;
use kvferry::proto::wire::{RecvFailure, TransferParams};

/// A prefill engine on the first host and a decode engine on the second.
struct Pair {
    p: Child,
    head: Child,
    d: Child,
    scheduler: Scheduler,
}

impl Pair {
    fn start(hosts: &Hosts, transport: Transport, env: &[(&str, &str)]) -> Pair {
        let rank = RankId { pp: 0, tp: 0 };
        let p_cache = CacheSpec::small(1, 1, 90);
        let d_cache = CacheSpec { seed: 91, ..p_cache.clone() };
        let worker = |host, engine: &str, cache: &CacheSpec| {
            let mut child = Child::start(rank, Some(hosts.netns(host)), env);
            let config = Box::new(worker_config(engine, rank, cache, transport));
            (child.bytes(&Ask::StartWorker { config, cache: Some(cache.clone()) }), child)
        };
        let (metadata, p) = worker(0, "prefill", &p_cache);
        let (_, d) = worker(1, "decode", &d_cache);
        let mut head = Child::start(rank, Some(hosts.netns(0)), &[]);
        let config = SchedulerConfig { host: None, ..scheduler_config("prefill", &p_cache) };
        head.ok(&Ask::StartScheduler { config: Box::new(config) });
        let Tell::Address(host, _) = head.ok(&Ask::Serve { ranks: vec![(rank, metadata)] }) else { panic!() };
        assert_eq!(host, hosts.addresses[0]);
        let scheduler = Scheduler::start(scheduler_config("decode", &d_cache)).unwrap();
        Pair { p, head, d, scheduler }
    }

    /// Hands a prompt over, and checks every byte of the decode engine's cache; or why it was not.
    fn hand_over(&mut self) -> Option<RecvFailure> {
        let (there, here): (Lists, Lists) = (lists(1, 12, true), lists(20, 12, false));
        self.p.ok(&Ask::Fill { request: "p".into(), blocks: there.clone() });
        let params = TransferParams { do_remote_decode: true, ..TransferParams::default() };
        let finished = Ask::Finished { request: "p".into(), params, blocks: there, tokens: 48 };
        let Tell::Params(Some(params)) = self.head.ok(&finished) else { panic!("no params") };
        self.p.ok(&Ask::Submit { step: self.head.bytes(&Ask::Step) });
        self.scheduler.allocated("d", &params, crate::common::engine::blocks(&here), 48, 48).unwrap();
        self.d.ok(&Ask::Submit { step: self.scheduler.step().unwrap() });
        let start = std::time::Instant::now();
        loop {
            assert!(start.elapsed() < LONG, "the decode engine does not report");
            let Some(report) = self.d.report(1_000) else { continue };
            if !report.finished_recving.iter().any(|r| r.as_str() == "d") {
                continue;
            }
            let failure = report.failed_recving.first().cloned();
            if failure.is_none() {
                self.d.check(&[Loaded::whole("p", &here)]);
            }
            return failure;
        }
    }
}

/// Two hosts joined by eth0, the default route's, each with further interfaces of these names and addresses.
fn hosts(interfaces: &[(&str, &str)]) -> Result<Hosts, String> {
    let hosts = Hosts::new(2, false)?;
    for (host, other) in [(0, 1), (1, 0)] {
        hosts.add_default_route(host, &hosts.addresses[other])?;
        for (name, address) in interfaces {
            hosts.add_interface(host, name, address)?;
        }
    }
    Ok(hosts)
}

#[test]
fn interfaces_that_repeat_are_not_used() {
    for transport in [Transport::Auto, Transport::Tcp] {
        let hosts = match hosts(&[
            ("docker0", "172.17.0.1/16"),
            ("br-12ab", "172.18.0.1/16"),
            ("flannel.1", "10.244.0.0/32"),
        ]) {
            Ok(hosts) => hosts,
            Err(why) => return skip("netns", &why),
        };
        let failure = Pair::start(&hosts, transport, &[]).hand_over();
        assert!(failure.is_none(), "{transport:?}: {failure:#?}");
    }
}

/// What the operator says is done, and the error tells the address that was tried.
#[test]
fn an_address_that_was_tried_in_vain_is_named() {
    let hosts = match hosts(&[("docker0", "172.17.0.1/16")]) {
        Ok(hosts) => hosts,
        Err(why) => return skip("netns", &why),
    };
    let failure = Pair::start(&hosts, Transport::Tcp, &[("UCX_NET_DEVICES", "docker0")]).hand_over();
    let message = failure.expect("this host's own docker0 is no way to the other").message;
    for part in ["tcp/docker0", "172.17.0.1", "UCX_NET_DEVICES"] {
        assert!(message.contains(part), "{message}");
    }
}

/// A host whose only address is on an interface that looks like one of containers, or on a bridge.
#[test]
fn the_only_interface_is_used_whatever_its_name() {
    for is_bridge in [false, true] {
        let hosts = match Hosts::new(2, false) {
            Ok(hosts) => hosts,
            Err(why) => return skip("netns", &why),
        };
        for host in [0, 1] {
            let made = if is_bridge { hosts.put_on_bridge(host, "docker0") } else { hosts.rename(host, "docker0") };
            made.unwrap();
        }
        let failure = Pair::start(&hosts, Transport::Tcp, &[]).hand_over();
        assert!(failure.is_none(), "bridge {is_bridge}: {failure:#?}");
    }
}

#[test]
fn a_setting_that_names_no_device_is_refused() {
    let hosts = match hosts(&[]) {
        Ok(hosts) => hosts,
        Err(why) => return skip("netns", &why),
    };
    for transport in [Transport::Auto, Transport::Tcp] {
        let rank = RankId { pp: 0, tp: 0 };
        let cache = CacheSpec::small(1, 1, 92);
        let mut child = Child::start(rank, Some(hosts.netns(0)), &[("UCX_NET_DEVICES", "ens9")]);
        let config = Box::new(worker_config("prefill", rank, &cache, transport));
        let Tell::Error { message, .. } = child.ask(&Ask::StartWorker { config, cache: None }) else {
            panic!("{transport:?}: it started without a network device");
        };
        for part in ["UCX_NET_DEVICES=ens9", "eth0, lo"] {
            assert!(message.contains(part), "{message}");
        }
    }
}
