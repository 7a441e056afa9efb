//! Prometheus' text format, version 0.0.4 (<https://prometheus.io/docs/instrumenting/exposition_formats/>).

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::metrics::{METRICS, Metric, MetricKind, MetricScope};
use crate::error::{Error, Result};
use crate::wire::Cause;

/// The stats of one source, with the labels that tell it from others. Maps as stats are given to hosts: `totals` of a
/// worker (or a report's), `agent` and `scheduler`, each where there is one, and `peers`, a map of each peer of an agent.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Row {
    /// Label names and values.
    pub labels: BTreeMap<String, String>,
    /// A worker's figures.
    pub totals: Option<Map<String, Value>>,
    /// An agent's figures.
    pub agent: Option<Map<String, Value>>,
    /// A scheduler side's figures.
    pub scheduler: Option<Map<String, Value>>,
    /// The figures of an agent's peers, each with its name and how it is reached.
    pub peers: Option<Vec<Map<String, Value>>>,
}

/// The labels of a peer's samples, by the keys of its map. All but the name are those of one sample only.
const PEER: (&str, &str) = ("name", "peer");
const ROUTE: [(&str, &str); 4] =
    [("lanes", "lanes"), ("host", "host_path"), ("device", "device_path"), ("mixed", "mixed_path")];

impl Row {
    /// The maps that have figures of this scope; `None` where the row has nothing of it.
    fn of(&self, scope: MetricScope) -> Option<Vec<&Map<String, Value>>> {
        match scope {
            MetricScope::Worker => self.totals.as_ref().map(|stats| vec![stats]),
            MetricScope::Agent => self.agent.as_ref().map(|stats| vec![stats]),
            MetricScope::Scheduler => self.scheduler.as_ref().map(|stats| vec![stats]),
            MetricScope::Peer => self.peers.as_ref().map(|peers| peers.iter().collect()),
        }
    }

    /// The row's labels and `more`, as they stand in a sample.
    fn labels<'a>(&'a self, more: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
        let own = self.labels.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let pairs: Vec<String> =
            own.chain(more).map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
    }

    fn check(&self) -> Result<()> {
        for name in self.labels.keys() {
            let word = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            if name.is_empty() || !word || name.starts_with("__") || name.starts_with(|c: char| c.is_ascii_digit()) {
                return Err(Error::invalid(format!(
                    "{name:?} cannot be a label's name; expected letters, digits and underscores, no digit first, and \
                     no two underscores first, which Prometheus keeps for itself"
                )));
            }
            let is_peers = PEER.1 == name || ROUTE.iter().any(|(_, label)| label == name);
            if name == "le" || name == "cause" || is_peers && self.peers.is_some() {
                return Err(Error::invalid(format!("the label {name:?} is one of kvferry's own; take another name")));
            }
        }
        Ok(())
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A number in the text. Prometheus holds all as 64-bit floats; larger whole numbers are rounded by it, not here.
fn number(metric: &Metric, value: Option<&Value>) -> Result<String> {
    match value {
        None => Ok("0".to_owned()),
        Some(Value::Number(number)) => Ok(number.to_string()),
        Some(other) => Err(Error::invalid(format!("{}: expected a number, got {other}", metric.key))),
    }
}

/// A count of microseconds or bytes in the unit that is shown, exactly.
fn scaled(kind: MetricKind, value: u64) -> String {
    if kind != MetricKind::Seconds {
        return value.to_string();
    }
    let text = format!("{}.{:06}", value / 1_000_000, value % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn histogram(text: &mut String, name: &str, metric: &Metric, row: &Row, value: Option<&Value>) -> Result<()> {
    let wrong =
        |found: &Value| Error::invalid(format!("{}: expected a map of counts and their sum, got {found}", metric.key));
    let null = Value::Null;
    let value = value.unwrap_or(&null);
    let whole = |value: &Value| value.as_u64().ok_or_else(|| wrong(value));
    let (counts, sum) = match value {
        Value::Null => (Vec::new(), 0),
        Value::Object(map) => {
            let counts = map.get("counts").and_then(Value::as_array).ok_or_else(|| wrong(value))?;
            (counts.iter().map(whole).collect::<Result<Vec<u64>>>()?, map.get("sum").map_or(Ok(0), whole)?)
        }
        other => return Err(wrong(other)),
    };
    let bounds: &[u64] = metric.kind.bounds().map_or(&[], |(bounds, _)| bounds);
    if counts.len() > bounds.len() + 1 {
        return Err(wrong(value));
    }
    let mut total = 0_u64;
    for index in 0..=bounds.len() {
        total = total.saturating_add(counts.get(index).copied().unwrap_or(0));
        let le = bounds.get(index).map_or("+Inf".to_owned(), |bound| scaled(metric.kind, *bound));
        line(text, &format!("{name}_bucket"), &row.labels([("le", le.as_str())]), &total.to_string());
    }
    line(text, &format!("{name}_sum"), &row.labels([]), &scaled(metric.kind, sum));
    line(text, &format!("{name}_count"), &row.labels([]), &total.to_string());
    Ok(())
}

fn line(text: &mut String, name: &str, labels: &str, value: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{name}{labels} {value}");
}

/// The labels that tell the samples of a peer from those of others, and in one sample how it is reached.
fn labels_of_peer<'a>(metric: &Metric, stats: &'a Map<String, Value>) -> Vec<(&'static str, &'a str)> {
    let routed = ROUTE.iter().filter(|_| metric.key == "connected");
    let keys = std::iter::once(&PEER).chain(routed).filter(|_| metric.scope == MetricScope::Peer);
    keys.map(|(key, label)| (*label, stats.get(*key).and_then(Value::as_str).unwrap_or(""))).collect()
}

/// All metrics of `rows`, under names with the prefix `kvferry_`. Figures that a map lacks are 0.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) for a label or a value that cannot be, by its name,
/// and for two rows with the same labels, which Prometheus could not tell apart.
pub fn prometheus(rows: &[Row]) -> Result<String> {
    let mut text = String::new();
    for row in rows {
        row.check()?;
    }
    for metric in METRICS {
        let concerned: Vec<&Row> = rows.iter().filter(|row| row.of(metric.scope).is_some()).collect();
        if concerned.is_empty() {
            continue;
        }
        let suffix = if metric.kind.name() == "counter" { "_total" } else { "" };
        let name = format!("kvferry_{}{suffix}", metric.name);
        // Help texts have neither backslashes nor line ends, which would have to be escaped.
        let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {}", metric.help, metric.kind.name());
        for (index, row) in concerned.iter().enumerate() {
            if concerned.iter().take(index).any(|other| other.labels == row.labels) {
                return Err(Error::invalid(format!(
                    "two rows have the labels {:?}; give each source a label of its own, such as its rank",
                    row.labels
                )));
            }
            for stats in row.of(metric.scope).unwrap_or_default() {
                let value = stats.get(metric.key);
                match metric.kind {
                    MetricKind::Counter | MetricKind::Gauge => {
                        let labels = row.labels(labels_of_peer(metric, stats));
                        line(&mut text, &name, &labels, &number(metric, value)?);
                    }
                    MetricKind::CounterByCause => {
                        for cause in Cause::ALL {
                            let count = value.and_then(|causes| causes.get(cause.name()));
                            line(&mut text, &name, &row.labels([("cause", cause.name())]), &number(metric, count)?);
                        }
                    }
                    MetricKind::Seconds | MetricKind::Bytes => histogram(&mut text, &name, metric, row, value)?,
                }
            }
        }
    }
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::stats::Stats;

    fn row(value: Value) -> Row {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_worker_s_figures_as_text() {
        let mut stats = Stats { recvs: 3, registered_bytes: 5, ..Stats::default() };
        stats.recv_failures.insert(Cause::Timeout, 2);
        stats.transfer_time.observe(1_500);
        stats.transfer_time.observe(2_000_000);
        stats.recv_bytes.observe(1 << 40);
        let text = prometheus(&[row(json!({"labels": {"rank": "a\"b\\c\nd"}, "totals": stats}))]).unwrap();
        let label = r#"rank="a\"b\\c\nd""#;
        for expected in [
            "# TYPE kvferry_recvs_total counter".to_owned(),
            format!("kvferry_recvs_total{{{label}}} 3"),
            format!("kvferry_recv_failures_total{{{label},cause=\"timeout\"}} 2"),
            format!("kvferry_recv_failures_total{{{label},cause=\"peer_died\"}} 0"),
            "# TYPE kvferry_transfer_seconds histogram".to_owned(),
            format!("kvferry_transfer_seconds_bucket{{{label},le=\"0.001\"}} 0"),
            format!("kvferry_transfer_seconds_bucket{{{label},le=\"0.0025\"}} 1"),
            format!("kvferry_transfer_seconds_bucket{{{label},le=\"30\"}} 2"),
            format!("kvferry_transfer_seconds_bucket{{{label},le=\"+Inf\"}} 2"),
            format!("kvferry_transfer_seconds_sum{{{label}}} 2.0015"),
            format!("kvferry_transfer_seconds_count{{{label}}} 2"),
            format!("kvferry_recv_bytes_bucket{{{label},le=\"65536\"}} 0"),
            format!("kvferry_recv_bytes_sum{{{label}}} 1099511627776"),
            format!("kvferry_registered_bytes{{{label}}} 5"),
        ] {
            assert!(text.lines().any(|line| line == expected), "{expected} is not in\n{text}");
        }
        assert!(!text.contains("agent_"), "{text}");
    }

    #[test]
    fn each_family_is_opened_once_for_all_rows() {
        let rows = [
            row(json!({"labels": {"rank": "0"}, "totals": {}, "agent": {"regions": 2}})),
            row(json!({"labels": {"rank": "1"}, "totals": {}})),
            row(json!({"scheduler": {"loads": 4}})),
        ];
        let text = prometheus(&rows).unwrap();
        for name in ["kvferry_recvs_total", "kvferry_agent_regions", "kvferry_scheduler_loads_total"] {
            assert_eq!(text.matches(&format!("# TYPE {name} ")).count(), 1, "{name}");
        }
        assert!(text.contains("kvferry_scheduler_loads_total 4\n"), "{text}");
        assert!(text.contains("kvferry_agent_regions{rank=\"0\"} 2\n"), "{text}");
    }

    #[test]
    fn peers_are_told_apart_by_their_names() {
        let peers = json!([
            {"name": "b", "connected": 1, "lanes": "tcp/lo", "host": "copied", "copied_bytes": 7},
            {"name": "c"},
        ]);
        let text = prometheus(&[row(json!({"labels": {"host": "h"}, "peers": peers}))]).unwrap();
        let route = r#"lanes="tcp/lo",host_path="copied",device_path="",mixed_path="""#;
        for expected in [
            "# TYPE kvferry_peer_copied_bytes_total counter".to_owned(),
            format!(r#"kvferry_peer_connected{{host="h",peer="b",{route}}} 1"#),
            r#"kvferry_peer_copied_bytes_total{host="h",peer="b"} 7"#.to_owned(),
            r#"kvferry_peer_copied_bytes_total{host="h",peer="c"} 0"#.to_owned(),
        ] {
            assert_eq!(text.lines().filter(|line| *line == expected).count(), 1, "{expected} is not in\n{text}");
        }
        let labelled = |peers: Value| row(json!({"labels": {"peer": "x"}, "totals": {}, "peers": peers}));
        assert!(prometheus(&[labelled(Value::Null)]).is_ok());
        assert!(prometheus(&[labelled(json!([]))]).unwrap_err().message().contains("\"peer\""));
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (bad, parts) in [
            (json!({"labels": {"a-b": "x"}, "totals": {}}), ["a-b", "letters"]),
            (json!({"labels": {"": "x"}, "totals": {}}), ["\"\"", "letters"]),
            (json!({"labels": {"9a": "x"}, "totals": {}}), ["9a", "digit"]),
            (json!({"labels": {"__name__": "x"}, "totals": {}}), ["__name__", "Prometheus"]),
            (json!({"labels": {"le": "x"}, "totals": {}}), ["\"le\"", "own"]),
            (json!({"totals": {"recvs": "many"}}), ["recvs", "many"]),
            (json!({"totals": {"recv_failures": {"timeout": []}}}), ["recv_failures", "[]"]),
            (json!({"totals": {"transfer_time": 3}}), ["transfer_time", "counts"]),
            (json!({"totals": {"transfer_time": {"counts": [-1]}}}), ["transfer_time", "-1"]),
            (json!({"totals": {"transfer_time": {"counts": vec![0; 21]}}}), ["transfer_time", "counts"]),
        ] {
            let error = prometheus(&[row(bad.clone())]).unwrap_err();
            for part in parts {
                assert!(error.message().contains(part), "{bad}: {part:?} is not in {error}");
            }
        }
        let twin = row(json!({"labels": {"rank": "0"}, "totals": {}}));
        assert!(prometheus(&[twin.clone(), twin]).unwrap_err().message().contains("two rows"));
    }
}
