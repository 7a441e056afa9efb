//! Arbitrary operations against the simulation, whose assertions are the properties.

use kvferry_proto::scheduler::FinishOutcome;
use proptest::prelude::*;

use crate::sim::{Sim, ms};

#[derive(Debug, Clone)]
enum Op {
    Prefill { blocks: usize, abort: bool },
    Announce(usize),
    Proceed(usize, usize),
    Preempt(usize, bool),
    Complete(usize, bool),
    Arrive(usize),
    Allocate(usize, usize),
    Finish(usize, bool),
    Run(u64),
    Partition(u64),
    Down(u64),
    RestartP,
    BreakConnections,
    FailTransfer,
    Verify(bool),
    DropVerdicts(bool),
    Pace { delay: u64, transfer: u64, lag: u64 },
    Twin(usize, bool),
    ShutDownD,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1usize..9, prop::bool::weighted(0.1)).prop_map(|(blocks, abort)| Op::Prefill { blocks, abort }),
        3 => (1usize..9).prop_map(Op::Announce),
        6 => (0usize..12, 1usize..4).prop_map(|(i, blocks)| Op::Proceed(i, blocks)),
        2 => (0usize..12, any::<bool>()).prop_map(|(i, tell)| Op::Preempt(i, tell)),
        5 => (0usize..12, prop::bool::weighted(0.2)).prop_map(|(i, abort)| Op::Complete(i, abort)),
        5 => (0usize..12).prop_map(Op::Arrive),
        8 => (0usize..12, prop_oneof![3 => Just(0usize), 1 => 0usize..9]).prop_map(|(i, c)| Op::Allocate(i, c)),
        4 => (0usize..12, any::<bool>()).prop_map(|(i, complete)| Op::Finish(i, complete)),
        10 => prop_oneof![3 => 0u64..20, 2 => 20u64..900, 1 => 900u64..7_000].prop_map(Op::Run),
        1 => (1u64..6_000).prop_map(Op::Partition),
        1 => (1u64..4_000).prop_map(Op::Down),
        1 => Just(Op::RestartP),
        1 => Just(Op::BreakConnections),
        1 => Just(Op::FailTransfer),
        1 => any::<bool>().prop_map(Op::Verify),
        1 => any::<bool>().prop_map(Op::DropVerdicts),
        2 => (0usize..12, any::<bool>()).prop_map(|(i, shared)| Op::Twin(i, shared)),
        2 => (0u64..50, prop_oneof![3 => 0u64..50, 1 => 0u64..6_000], prop_oneof![3 => 0u64..50, 1 => 0u64..2_000])
            .prop_map(|(delay, transfer, lag)| Op::Pace { delay, transfer, lag }),
    ]
}

fn apply(sim: &mut Sim, op: Op) {
    let known = sim.requests.len();
    let pick = |i: usize| (known > 0).then(|| known - 1 - i % known);
    match op {
        Op::Prefill { blocks, abort } => drop(sim.prefill(blocks, abort)),
        Op::Announce(blocks) => _ = sim.announce(blocks),
        Op::Proceed(i, blocks) => pick(i).into_iter().for_each(|i| sim.proceed(i, blocks)),
        Op::Preempt(i, tell) => pick(i).into_iter().for_each(|i| sim.preempt(i, tell)),
        Op::Complete(i, abort) => pick(i).into_iter().for_each(|i| sim.complete(i, abort)),
        Op::Arrive(i) => pick(i).into_iter().for_each(|i| sim.arrive(i)),
        Op::Allocate(i, cached) => pick(i).into_iter().for_each(|i| sim.allocate(i, cached)),
        Op::Finish(i, complete) => {
            let outcome = if complete { FinishOutcome::Complete } else { FinishOutcome::Aborted };
            pick(i).into_iter().for_each(|i| sim.finish(i, outcome));
        }
        Op::Run(n) => sim.run(ms(n)),
        Op::Partition(n) => sim.partition_until = sim.now + ms(n),
        Op::Down(n) => sim.down_until = sim.now + ms(n),
        Op::RestartP => sim.restart_p(),
        Op::BreakConnections => sim.break_connections(),
        Op::FailTransfer => sim.fail_next_transfer = true,
        Op::Verify(on) => sim.verify = on,
        Op::DropVerdicts(on) => sim.drop_verdicts = on,
        Op::Pace { delay, transfer, lag } => {
            (sim.delay, sim.transfer_time, sim.p_lag) = (ms(delay), ms(transfer), ms(lag));
        }
        Op::Twin(i, shared) => {
            if let Some(i) = pick(i) {
                if shared {
                    sim.share(i);
                }
                sim.twin(i);
            }
        }
        Op::ShutDownD => sim.shut_down_d(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(400), ..Default::default() })]

    #[test]
    fn every_sequence_of_events_keeps_the_rules(ops in prop::collection::vec(op(), 1..80)) {
        let mut sim = Sim::new();
        for op in ops {
            apply(&mut sim, op);
        }
        sim.settle();
    }

    #[test]
    fn a_consumer_that_shuts_down_still_reports_every_load(
        before in prop::collection::vec(op(), 1..40),
        after in prop::collection::vec(op(), 0..20),
    ) {
        let mut sim = Sim::new();
        for op in before.into_iter().chain([Op::ShutDownD]).chain(after) {
            apply(&mut sim, op);
        }
        sim.settle();
    }
}

/// Two handshakes with one engine are under way; the second finds what the first has connected to.
#[test]
fn a_route_that_leads_to_a_session_already_goes_on_leading_there() {
    let mut sim = Sim::new();
    let prefill = || Op::Prefill { blocks: 1, abort: false };
    let ops = [Op::Announce(1), prefill(), prefill(), Op::Partition(1041), Op::Announce(1), Op::Finish(0, false)];
    for op in ops.into_iter().chain([Op::Allocate(3, 0), Op::Run(1), Op::Allocate(1, 0), Op::Partition(1)]) {
        apply(&mut sim, op);
    }
    sim.settle();
}
