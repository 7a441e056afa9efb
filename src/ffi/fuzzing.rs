//! The maps that cross the C ABI, for fuzz targets.

use super::decode::{encode, map};
use super::{aggregator, listener};
use crate::agent::AgentConfig;
use crate::connector::{SchedulerConfig, WorkerConfig};
use crate::planner::Deployment;
use crate::proto::aggregate::Aggregator;
use crate::proto::geometry::Geometry;
use crate::proto::shape::EngineSpec;
use crate::proto::stats::Stats;
use crate::proto::wire::{TransferParams, WorkerReport};
use crate::settings::{Component, parse_config};

/// How many kinds of map [`config`] knows.
pub const CONFIGS: u8 = 10;

/// Decodes and checks a map as the C function that takes it does. It starts nothing.
pub fn config(which: u8, bytes: &[u8]) -> bool {
    match which % CONFIGS {
        0 => parse_config::<AgentConfig>(Component::Agent, bytes).and_then(|config| config.validate()).is_ok(),
        1 => parse_config::<listener::ListenerOptions>(Component::Listener, bytes)
            .and_then(|config| config.bind_port())
            .is_ok(),
        2 => parse_config::<WorkerConfig>(Component::Worker, bytes)
            .and_then(|config| config.check().and_then(|()| config.compat()))
            .is_ok(),
        3 => parse_config::<SchedulerConfig>(Component::Scheduler, bytes)
            .and_then(|config| config.check().and_then(|()| config.bind_port()))
            .is_ok(),
        4 => parse_config::<aggregator::AggregatorOptions>(Component::Aggregator, bytes)
            .and_then(|config| match config.limit {
                Some(limit) => Aggregator::with_limit(config.ranks, limit),
                None => Aggregator::new(config.ranks),
            })
            .is_ok(),
        5 => map::<Geometry>("the geometry", bytes).and_then(|geometry| geometry.validate(&[])).is_ok(),
        6 => map::<WorkerReport>("the report", bytes).is_ok(),
        7 => {
            let Ok(stats) = map::<Stats>("left", bytes) else { return false };
            let mut sum = stats.clone();
            sum.merge(&stats);
            encode("stats", &sum).is_ok()
        }
        8 => map::<TransferParams>("kv_transfer_params", bytes).is_ok(),
        _ => {
            let Ok(deployment) = map::<Deployment>("deployment", bytes) else { return false };
            // Its bounds are for people who wait for an answer, not for thousands of runs a second.
            let large = |e: &EngineSpec| e.tp.max(e.pp) > 3 || e.num_blocks > 1 << 12;
            if deployment.tokens > 1 << 12 || large(&deployment.producer) || large(&deployment.consumer) {
                return true;
            }
            deployment.describe().is_ok()
        }
    }
}
