//! `kvf_stats_*`: figures of workers, agents and scheduler sides.

use serde::{Deserialize, Serialize};

use super::boundary::slice;
use super::buffer::{fill, kvf_buffer};
use super::decode;
use crate::error::Result;
use crate::proto::stats::{METRICS, MetricKind, MetricScope, Row, Stats, prometheus};
use crate::proto::wire::Cause;

/// Adds two maps of a worker's figures, such as the stats of a report. An empty map is the identity; the order does not
/// matter.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_stats_merge(
    left: *const u8,
    left_len: usize,
    right: *const u8,
    right_len: usize,
    out: *mut kvf_buffer,
) -> i32 {
    boundary!(kvf_stats_merge, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let (left, right) = (slice(left, left_len, "left")?, slice(right, right_len, "right")?);
            fill(out, || merge(left, right))
        }
    })
}

fn merge(left: &[u8], right: &[u8]) -> Result<Vec<u8>> {
    let mut sum: Stats = decode::map("left", left)?;
    sum.merge(&decode::map("right", right)?);
    decode::encode("stats", &sum)
}

#[derive(Serialize)]
struct MetricTable {
    metrics: Vec<MetricEntry>,
}

#[derive(Serialize)]
struct MetricEntry {
    scope: MetricScope,
    key: &'static str,
    kind: MetricKind,
    name: &'static str,
    unit: &'static str,
    help: &'static str,
    causes: Vec<&'static str>,
    bounds: Vec<u64>,
    divisor: u64,
}

/// Describes every figure, as a msgpack map whose metrics is a list of maps: scope ("worker": the stats of reports and the
/// totals of kvf_worker_stats; "agent"; "peer": the maps of kvf_agent_peers; "scheduler"), key (there), kind ("counter",
/// "gauge" or "histogram"), name (in Prometheus, without prefix and the _total of counters), unit, help; causes, of a counter that is a map by cause, else
/// empty; bounds and divisor of histograms, which are maps of counts per bucket (without zeros at the end) and sum:
/// the inclusive upper bounds of all buckets but the last, and by what bounds and sum are divided to give `unit`.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_stats_metrics(out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_stats_metrics, {
        let entry = |metric: &crate::proto::stats::Metric| {
            let (bounds, divisor) =
                metric.kind.bounds().map_or((Vec::new(), 1), |(bounds, divisor)| (bounds.to_vec(), divisor));
            let by_cause = metric.kind == MetricKind::CounterByCause;
            MetricEntry {
                scope: metric.scope,
                key: metric.key,
                kind: metric.kind,
                name: metric.name,
                unit: metric.unit,
                help: metric.help,
                causes: if by_cause { Cause::ALL.map(Cause::name).to_vec() } else { Vec::new() },
                bounds,
                divisor,
            }
        };
        // SAFETY: the caller's promise for out-parameters.
        unsafe {
            fill(out, || decode::encode("the metrics", &MetricTable { metrics: METRICS.iter().map(entry).collect() }))
        }
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    rows: Vec<Row>,
}

/// Figures in Prometheus' text format, under names that begin with kvferry_. `rows` is a msgpack map whose rows is a list
/// of maps, one per source: labels (map of texts), and of totals (of kvf_worker_stats, or merged stats of reports), agent
/// (of kvf_agent_stats), peers (the list of that name of kvf_agent_peers) and scheduler (of kvf_scheduler_stats) those that there are; other keys
/// are ignored.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_stats_prometheus(rows: *const u8, rows_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_stats_prometheus, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let rows = slice(rows, rows_len, "rows")?;
            fill(out, || Ok(prometheus(&decode::map::<Rows>("the rows", rows)?.rows)?.into_bytes()))
        }
    })
}
