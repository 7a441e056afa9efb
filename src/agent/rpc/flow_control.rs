//! How much may be asked of a peer at a time: enough to keep the connection busy, and not more, since what is under way
//! stands in front of every later request, in queues that nobody can reorder (sockets, the peer's send queue).
//!
//! The measure is that of BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14-5, 2016): the
//! best rate at which replies came lately, times the shortest time that one took, is what fits on the way; twice as much
//! keeps it full. While the rate still grows with the window, so does the window.

use std::time::{Duration, Instant};

use super::pace::Pace;

/// The least that may be under way, in bytes: a few chunks.
const LEAST: u64 = 3 << 20;
/// Times what fits on the way.
const GAIN: f64 = 2.0;
/// What is left of the best rate after a reply that was slower.
const DECAY: f64 = 0.98;
/// How long the shortest time counts: routes and neighbours change.
const MEMORY: Duration = Duration::from_secs(10);

/// What a request is measured by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Departure {
    at: Instant,
    delivered: u64,
}

impl Departure {
    /// When the request left.
    pub(crate) fn at(&self) -> Instant {
        self.at
    }
}

/// One connection's measurements.
#[derive(Debug)]
pub(crate) struct FlowControl {
    /// Bytes that have come, all together.
    delivered: u64,
    /// Bytes per second.
    rate: f64,
    /// The shortest time from a request to its reply, and when it was seen.
    shortest: Option<(Duration, Instant)>,
    /// Requests without their reply.
    under_way: u64,
    pace: Pace,
}

impl FlowControl {
    pub(crate) fn new(now: Instant) -> Self {
        FlowControl { delivered: 0, rate: 0.0, shortest: None, under_way: 0, pace: Pace::new(now) }
    }

    /// What a request that leaves now is measured by.
    pub(crate) fn depart(&self, now: Instant) -> Departure {
        Departure { at: now, delivered: self.delivered }
    }

    /// The request has left.
    pub(crate) fn departed(&mut self, departure: Departure) {
        if self.under_way == 0 {
            self.pace.begin(departure.at);
        }
        self.under_way = self.under_way.saturating_add(1);
    }

    /// Whether there are requests whose replies come so fast that it is worth spinning for them.
    pub(crate) fn is_fast(&self, now: Instant) -> bool {
        self.under_way > 0 && self.pace.is_fast(now)
    }

    /// Its reply of `bytes` has come.
    pub(crate) fn arrive(&mut self, departure: Departure, bytes: u64, now: Instant) {
        self.pace.moved(bytes, now);
        self.under_way = self.under_way.saturating_sub(1);
        self.delivered = self.delivered.saturating_add(bytes);
        let took = now.saturating_duration_since(departure.at);
        let sample = self.delivered.saturating_sub(departure.delivered) as f64 / took.as_secs_f64().max(1e-6);
        self.rate = sample.max(self.rate * DECAY);
        let shorter = self
            .shortest
            .is_none_or(|(shortest, seen)| took <= shortest || now.saturating_duration_since(seen) >= MEMORY);
        if shorter {
            self.shortest = Some((took, now));
        }
    }

    /// Bytes that may be under way, `most` at most.
    pub(crate) fn window(&self, most: u64) -> u64 {
        let shortest = self.shortest.map_or(0.0, |(shortest, _)| shortest.as_secs_f64());
        // As an integer it saturates.
        ((GAIN * self.rate * shortest) as u64).max(LEAST).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 512 << 10;

    /// A link of `rate` bytes per second and a round trip of `delay`, always asked for as much as the window allows.
    /// Returns the window after some seconds and the share of the link's rate that was used.
    fn run(rate: f64, delay: Duration, most: u64) -> (u64, f64) {
        let begin = Instant::now();
        let mut flow = FlowControl::new(begin);
        let (mut now, mut free_at) = (begin, begin);
        let mut under_way = std::collections::VecDeque::new();
        let mut moved = 0;
        for _ in 0..4000 {
            while (under_way.len() as u64 + 1) * CHUNK <= flow.window(most) {
                // The reply is sent when the link is free, and arrives half a round trip later.
                free_at = free_at.max(now + delay / 2) + Duration::from_secs_f64(CHUNK as f64 / rate);
                under_way.push_back((flow.depart(now), free_at + delay / 2));
            }
            let Some((departure, arrival)) = under_way.pop_front() else { break };
            now = arrival;
            flow.arrive(departure, CHUNK, now);
            moved += CHUNK;
        }
        (flow.window(most), moved as f64 / (now - begin).as_secs_f64() / rate)
    }

    #[test]
    fn a_short_way_keeps_a_small_window_and_a_long_one_gets_a_large_one() {
        let (window, used) = run(3e9, Duration::from_micros(50), 64 << 20);
        assert!(window <= 4 << 20 && used > 0.95, "{window} {used}");
        // 10 Gbit/s over 10 ms: 12.5 MB fit on the way.
        let (window, used) = run(1.25e9, Duration::from_millis(10), 64 << 20);
        assert!((12 << 20..=40 << 20).contains(&window) && used > 0.9, "{window} {used}");
        let (window, _) = run(1.25e9, Duration::from_millis(10), 4 << 20);
        assert_eq!(window, 4 << 20);
    }
}
