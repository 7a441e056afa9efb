//! A producer and a consumer engine in simulated time, as in `proto/tests/proto_pair`: both worker machines, both scheduler
//! machines, memory that is overwritten the moment it comes free, and a network that fails. The simulation asserts that
//! every load has one terminal report, that what is reported good has every byte right, that nothing is written while
//! nothing loads it, that no read is found good whose blocks are free, and that at the end nothing is left.

#[path = "../../proto/tests/proto_pair/rank.rs"]
pub mod rank;
#[path = "../../proto/tests/proto_pair/sim.rs"]
#[allow(dead_code)]
mod sim;

use kvferry::proto::scheduler::FinishOutcome;

use super::Source;
pub use sim::worker_config;
use sim::{Sim, ms};

fn step(sim: &mut Sim, source: &mut Source) {
    let known = sim.requests.len();
    let pick = |source: &mut Source| (known > 0).then(|| known - 1 - source.below(12) % known);
    match source.below(24) {
        0..=3 => {
            let blocks = 1 + source.below(8);
            let abort = source.rarely(10);
            sim.prefill(blocks, abort);
        }
        4..=6 => pick(source).into_iter().for_each(|i| sim.arrive(i)),
        7..=10 => {
            let cached = if source.rarely(4) { source.below(9) } else { 0 };
            pick(source).into_iter().for_each(|i| sim.allocate(i, cached));
        }
        11 | 12 => {
            let outcome = if source.flag() { FinishOutcome::Complete } else { FinishOutcome::Aborted };
            pick(source).into_iter().for_each(|i| sim.finish(i, outcome));
        }
        13 | 14 => sim.run(ms(source.below(20) as u64)),
        15 => sim.run(ms(u64::from(source.short()) % 900)),
        16 => sim.run(ms(u64::from(source.short()) % 7_000)),
        17 => sim.partition_until = sim.now + ms(u64::from(source.short()) % 6_000),
        18 => sim.down_until = sim.now + ms(u64::from(source.short()) % 4_000),
        19 => match source.below(4) {
            0 => sim.restart_p(),
            1 => sim.break_connections(),
            2 => sim.fail_next_transfer = true,
            _ => sim.drop_verdicts = source.flag(),
        },
        20 => {
            if let Some(i) = pick(source) {
                if source.flag() {
                    sim.share(i);
                }
                sim.twin(i);
            }
        }
        21 => {
            sim.delay = ms(source.below(50) as u64);
            sim.transfer_time = ms(u64::from(source.short()) % 6_000);
            sim.p_lag = ms(u64::from(source.short()) % 2_000);
        }
        22 => (sim.delay, sim.transfer_time, sim.p_lag) = (ms(1), ms(5), ms(1)),
        _ => {
            if source.rarely(16) {
                sim.shut_down_d();
            }
        }
    }
}

/// A sequence of events, and then the end.
pub fn run(data: &[u8]) {
    let mut source = Source::new(data);
    let mut sim = Sim::new();
    for _ in 0..400 {
        if source.is_empty() {
            break;
        }
        step(&mut sim, &mut source);
    }
    sim.settle();
}
