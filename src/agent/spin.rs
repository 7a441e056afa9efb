//! How long the ferry thread spins before it sleeps.
//!
//! For [`AgentConfig::spin`](super::AgentConfig::spin) always; and then, up to
//! [`AgentConfig::idle_spin`](super::AgentConfig::idle_spin), while nobody else wants its processor. The kernel tells in
//! two ways: how many threads of the machine could run now (`/proc/loadavg`, the number before the slash), and for how
//! long this thread could have run and did not (the second number of `/proc/thread-self/schedstat`, in nanoseconds;
//! Linux's `Documentation/scheduler/sched-stats.rst`), which grows when it was put aside for another one. The first
//! spares the others a wait before they are put aside themselves; the second holds where a thread may not go everywhere.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

/// How often a long spin asks the kernel. A question takes some microseconds.
const ASK_INTERVAL: Duration = Duration::from_micros(200);
/// Interrupts and the kernel's own short work take the processor too, for less.
const TOLERATED: u64 = 50_000;
/// How long nothing spins long after somebody else wanted the processor.
const PAUSE: Duration = Duration::from_millis(100);

/// The ferry thread's patience.
#[derive(Debug)]
pub(super) struct Spin {
    always: Duration,
    idle: Duration,
    /// `None` where the kernel keeps no such figures, and for who does not want long spins.
    kernel: Option<Kernel>,
    /// When the kernel was asked last, and what this thread had waited until then; `None` at the begin of a spin.
    asked: Option<(Instant, u64)>,
    /// No long spins until then.
    pause: Option<Instant>,
}

impl Spin {
    /// Of the calling thread.
    pub(super) fn of_this_thread(always: Duration, idle: Duration) -> Spin {
        let kernel = (idle > always).then(Kernel::of_this_thread).flatten();
        Spin { always, idle, kernel, asked: None, pause: None }
    }

    /// The longest spin that there is.
    pub(super) fn longest(&self) -> Duration {
        if self.kernel.is_some() { self.idle } else { self.always }
    }

    /// Whether a thread that has had no progress for `quiet` should spin on.
    pub(super) fn goes_on(&mut self, quiet: Duration, now: Instant) -> bool {
        if quiet < self.always {
            self.asked = None;
            return true;
        }
        if quiet >= self.longest() || self.pause.is_some_and(|until| now < until) {
            return false;
        }
        if self.asked.is_some_and(|(at, _)| now.saturating_duration_since(at) < ASK_INTERVAL) {
            return true;
        }
        let Some((is_crowded, waited)) = self.kernel.as_ref().and_then(Kernel::ask) else { return false };
        let grown = self.asked.map_or(0, |(_, before)| waited.saturating_sub(before));
        self.asked = Some((now, waited));
        if grown > TOLERATED {
            self.pause = Some(now + PAUSE);
            return false;
        }
        !is_crowded
    }
}

/// Where the kernel tells who wants a processor.
#[derive(Debug)]
struct Kernel {
    schedstat: File,
    loadavg: File,
    /// That this thread may run on.
    processors: u64,
}

impl Kernel {
    fn of_this_thread() -> Option<Kernel> {
        Some(Kernel {
            schedstat: File::open("/proc/thread-self/schedstat").ok()?,
            loadavg: File::open("/proc/loadavg").ok()?,
            processors: u64::try_from(thread::available_parallelism().ok()?.get()).ok()?,
        })
    }

    /// Whether more threads could run than there are processors, and for how many nanoseconds this one could have run and
    /// did not.
    fn ask(&self) -> Option<(bool, u64)> {
        // "0.20 0.18 0.12 1/80 11206": proc_loadavg(5).
        let running = word(&self.loadavg, 3, |word| word.split('/').next()?.parse::<u64>().ok())?;
        let waited = word(&self.schedstat, 1, |word| word.parse().ok())?;
        Some((running > self.processors, waited))
    }
}

/// What `parse` makes of a word of a short file.
fn word<T>(file: &File, index: usize, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    // Numbers of at most twenty digits, five of them at most.
    let mut text = [0; 128];
    let length = file.read_at(&mut text, 0).ok()?;
    parse(std::str::from_utf8(text.get(..length)?).ok()?.split_ascii_whitespace().nth(index)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    const ALWAYS: Duration = Duration::from_micros(300);
    const IDLE: Duration = Duration::from_millis(10);

    #[test]
    fn it_ends_at_its_bounds() {
        let now = Instant::now();
        let mut short = Spin::of_this_thread(ALWAYS, Duration::ZERO);
        assert!(short.goes_on(ALWAYS / 2, now));
        assert!(!short.goes_on(ALWAYS, now));
        let mut long = Spin::of_this_thread(ALWAYS, IDLE);
        assert!(long.goes_on(ALWAYS / 2, now));
        assert!(!long.goes_on(IDLE, now));
        let mut never = Spin::of_this_thread(Duration::ZERO, Duration::ZERO);
        assert!(!never.goes_on(Duration::ZERO, now));
    }

    #[test]
    fn whoever_wants_the_processor_ends_it() {
        let mut spin = Spin::of_this_thread(ALWAYS, IDLE);
        if spin.kernel.as_ref().and_then(Kernel::ask).is_none() {
            println!("skipped: this kernel has no /proc/loadavg or /proc/thread-self/schedstat");
            return;
        }
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 * thread::available_parallelism().unwrap().get() {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let begin = Instant::now();
            while spin.goes_on(2 * ALWAYS, Instant::now()) && begin.elapsed() < Duration::from_secs(60) {}
            is_over.store(true, Ordering::Relaxed);
            assert!(begin.elapsed() < Duration::from_secs(60));
            assert!(spin.goes_on(ALWAYS / 2, Instant::now()));
        });
    }
}
