//! Leaving a processor that two busy threads share while another one is idle.
//!
//! Linux wakes a thread on the processor of the one that woke it unless it sees an idle one, and in a virtual machine a
//! processor that the host has put to rest need not look idle (`available_idle_cpu` asks `vcpu_is_preempted`). Two
//! progress threads that answer each other, or a copy thread and its progress thread, then take turns on one processor
//! until the kernel's balancing parts them some milliseconds later, which is longer than most transfers take. So a thread
//! that was woken and finds itself on the processor of the one that waits for it leaves that processor, and so does one that
//! moves bytes and has to wait for its own: it forbids itself the processor, which moves it at once, and allows it again.
//!
//! It allows it again when it runs, and until then nothing brings it back. Where another program computes on the processor
//! that it moves to, that can take 100 ms, even while the processor that it has left stands idle. So nobody moves while
//! more threads want to run than there are processors.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

pub(crate) use crate::sys::thread::processor;

/// How long a progress thread's wait for its processor is measured, some hundred times what looking costs.
const WINDOW: Duration = Duration::from_micros(500);
/// A window that became longer says nothing of now: the thread slept meanwhile.
const STALE: Duration = Duration::from_millis(5);
/// After a step: how long until the next one, doubled whenever the last one was of no use because all processors are busy.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Moves the calling thread away from processor `from`, if it is there, may run on another one of the same package, and
/// one is likely to be idle.
pub(crate) fn leave(from: usize) {
    if processor() == from && room() {
        move_from(from);
    }
}

fn move_from(from: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let Some(others) = others(&allowed, from) else { return };
    // It is moved by the first call and may return after the second one, where the kernel finds that better later.
    if sched_setaffinity(None, &others).is_ok() {
        let _ = sched_setaffinity(None, &allowed);
    }
}

/// The machine's processors, and the kernel's count of the threads that want to run; `None` where it does not say.
static MACHINE: LazyLock<Option<(usize, File)>> = LazyLock::new(|| {
    let online = parse(&std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?)?.len();
    Some((online, File::open("/proc/loadavg").ok()?))
});

/// Whether no more threads want to run than there are processors: one of them is idle then if two share another one.
fn room() -> bool {
    MACHINE.as_ref().is_none_or(|(online, load)| running(load).is_none_or(|running| running <= *online))
}

/// How many threads run or wait for a processor, on the whole machine.
fn running(load: &File) -> Option<usize> {
    let mut text = [0; 128];
    let len = load.read_at(&mut text, 0).ok()?;
    runnable(std::str::from_utf8(text.get(..len)?).ok()?)
}

/// The fourth field of /proc/loadavg: as in `0.20 0.18 0.12 1/80 11206`, those that want to run of all (`man proc_loadavg`).
fn runnable(text: &str) -> Option<usize> {
    text.split_whitespace().nth(3)?.split_once('/')?.0.parse().ok()
}

/// Which processors are of a processor's package, and which of its core.
struct Neighbours {
    package: Vec<usize>,
    core: Vec<usize>,
}

/// Of each processor that was asked for, `None` where the kernel does not say. They stay the same, and to read them takes as
/// long as the wait for a processor that a step is to spare.
static NEIGHBOURS: Mutex<BTreeMap<usize, Option<Neighbours>>> = Mutex::new(BTreeMap::new());

fn neighbours(of: usize) -> Option<Neighbours> {
    let list = |name: &str| {
        let path = format!("/sys/devices/system/cpu/cpu{of}/topology/{name}");
        parse(&std::fs::read_to_string(path).ok()?)
    };
    Some(Neighbours { package: list("package_cpus_list")?, core: list("core_cpus_list").unwrap_or_default() })
}

/// The processors of `allowed` that a thread on `from` may move to: of the same package, because its memory is near there.
fn others(allowed: &CpuSet, from: usize) -> Option<CpuSet> {
    let mut known = NEIGHBOURS.lock().unwrap_or_else(PoisonError::into_inner);
    let Neighbours { package, core } = known.entry(from).or_insert_with(|| neighbours(from)).as_ref()?;
    choose(allowed, from, package, core)
}

/// The processors of `allowed` and `package` without those of `core`, or without `from` alone where that leaves none.
fn choose(allowed: &CpuSet, from: usize, package: &[usize], core: &[usize]) -> Option<CpuSet> {
    let without = |left_out: &[usize]| {
        let mut set = CpuSet::new();
        let rest = package.iter().filter(|cpu| allowed.is_set(**cpu) && **cpu != from && !left_out.contains(cpu));
        rest.for_each(|cpu| set.set(*cpu));
        (set.count() > 0).then_some(set)
    };
    without(core).or_else(|| without(&[]))
}

/// A list of processors as the kernel prints it, such as `0-3,8`.
fn parse(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        // What does not fit a set of processors is none of them.
        all.extend(first..=last.min(CpuSet::MAX_CPU.saturating_sub(1)));
    }
    Some(all)
}

/// Moves a progress thread away from a processor that it has to wait for while it moves bytes.
pub(crate) struct ProcessorWait {
    /// The kernel's account of the thread; `None` where it keeps none.
    account: Option<File>,
    /// When the window began, and what the thread had waited for processors then, in ns.
    begin: Option<(Instant, u64)>,
    /// Crowded windows in a row, with a processor to go to.
    crowded: u32,
    /// When it may leave one again, and the pause after that.
    next: Option<Instant>,
    pause: Duration,
}

impl ProcessorWait {
    /// For the calling thread.
    pub(crate) fn new() -> Self {
        let account = File::open("/proc/thread-self/schedstat").ok();
        // Opened now, so that the number of open files does not depend on when a thread first waits.
        LazyLock::force(&MACHINE);
        ProcessorWait { account, begin: None, crowded: 0, next: None, pause: PAUSE }
    }

    /// To be called again and again by a thread that moves bytes. Of two threads that are in each other's way only one should
    /// go: the `first` one goes at once, the other one if that did not help.
    pub(crate) fn look(&mut self, now: Instant, first: bool) {
        let window = match self.begin {
            Some((at, waited)) => {
                let passed = now.saturating_duration_since(at);
                if passed < WINDOW {
                    return;
                }
                (passed <= STALE).then_some((passed, waited))
            }
            None => None,
        };
        let total = self.waited();
        self.begin = total.map(|total| (now, total));
        if let (Some((passed, before)), Some(total)) = (window, total) {
            let waited = Duration::from_nanos(total.saturating_sub(before));
            if self.judge(now, passed, waited, first, room) {
                move_from(processor());
            }
        }
    }

    /// Whether to leave the processor after a window of `passed` in which the thread has waited for `waited`; `room` says
    /// whether there is a processor to go to.
    fn judge(
        &mut self,
        now: Instant,
        passed: Duration,
        waited: Duration,
        first: bool,
        room: impl FnOnce() -> bool,
    ) -> bool {
        if waited < passed / 4 {
            self.crowded = 0;
            self.pause = PAUSE;
            return false;
        }
        if !room() {
            self.crowded = 0;
            return false;
        }
        self.crowded = self.crowded.saturating_add(1);
        if self.crowded < if first { 1 } else { 3 } || self.next.is_some_and(|at| now < at) {
            return false;
        }
        self.next = now.checked_add(self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.crowded = 0;
        true
    }

    /// What the thread has waited for processors, in ns.
    fn waited(&self) -> Option<u64> {
        let mut text = [0; 64];
        let len = self.account.as_ref()?.read_at(&mut text, 0).ok()?;
        // Time on a processor, time waiting for one, and how often (the kernel's Documentation/scheduler/sched-stats.rst).
        std::str::from_utf8(text.get(..len)?).ok()?.split_whitespace().nth(1)?.parse().ok()
    }
}

/// Keeps a progress thread off the processor of one that asks it for bytes: Linux wakes it there, where it waits while
/// the other one spins, and both then take turns until [`ProcessorWait`] has measured it.
#[derive(Default)]
pub(crate) struct KeepApart {
    next: Option<Instant>,
    /// How often in a row they were found together.
    together: u32,
}

impl KeepApart {
    /// Leaves the processor of who asked, if this thread is on it; `theirs` is its number modulo 2^16.
    pub(crate) fn look(&mut self, theirs: u16, now: Instant) {
        let own = processor();
        if self.judge(own as u16 == theirs, now, room) {
            move_from(own);
        }
    }

    /// Whether to go. Where that turns out to be of no use it is done less and less often.
    fn judge(&mut self, together: bool, now: Instant, room: impl FnOnce() -> bool) -> bool {
        if !together {
            self.together = 0;
            return false;
        }
        if self.next.is_some_and(|next| now < next) || !room() {
            return false;
        }
        self.next = now.checked_add((PAUSE * (1 << self.together.min(8))).min(LONGEST_PAUSE));
        self.together = self.together.saturating_add(1);
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn lists_of_processors_are_read_as_the_kernel_prints_them() {
        assert_eq!(parse("0-2,8,10-11\n").unwrap(), [0, 1, 2, 8, 10, 11]);
        assert_eq!(parse("7\n").unwrap(), [7]);
        assert_eq!(parse(&format!("1022-{}", usize::MAX)).unwrap(), [1022, 1023]);
        assert!(parse("").is_none() && parse("a-b").is_none());
    }

    #[test]
    fn a_thread_moves_within_its_package_to_another_core_where_there_is_one() {
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|cpu| set.set(*cpu));
            set
        };
        let choose = |allowed: &[usize], core: &[usize]| choose(&set(allowed), 1, &[0, 1, 2, 3], core);
        assert_eq!(choose(&[0, 1, 2, 3, 4], &[0, 1]), Some(set(&[2, 3])));
        assert_eq!(choose(&[0, 1, 4], &[0, 1]), Some(set(&[0])));
        assert_eq!(choose(&[0, 1, 2], &[]), Some(set(&[0, 2])));
        assert_eq!(choose(&[1, 4], &[1]), None);
    }

    #[test]
    fn leaving_moves_a_thread_and_leaves_it_its_processors() {
        let allowed = sched_getaffinity(None).unwrap();
        for _ in 0..10 {
            leave(processor());
            move_from(processor());
        }
        assert_eq!(sched_getaffinity(None).unwrap(), allowed);
        // A processor that the thread is not on is left already.
        leave(CpuSet::MAX_CPU);
    }

    #[test]
    fn what_the_kernel_says_of_threads_that_want_to_run_is_understood() {
        assert_eq!(runnable("0.20 0.18 0.12 3/80 11206\n"), Some(3));
        assert!(runnable("0.20 0.18 0.12 - 11206").is_none() && runnable("").is_none());
        // This thread is one of them.
        let (online, load) = MACHINE.as_ref().unwrap();
        assert!(*online > 0 && running(load).unwrap() > 0);
    }

    #[test]
    fn one_of_two_crowded_threads_goes_first_and_vain_steps_become_rare() {
        let free = || true;
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let (window, half, little) = (WINDOW, WINDOW / 2, WINDOW / 5);
        let (mut one, mut other) = (ProcessorWait::new(), ProcessorWait::new());
        assert!(!one.judge(at(0), window, little, true, free));
        assert!(one.judge(at(500), window, half, true, free));
        assert!(!other.judge(at(500), window, half, false, free));
        // The other one goes when that was of no use.
        assert!(!other.judge(at(1000), window, half, false, free));
        assert!(other.judge(at(1500), window, half, false, free));
        // Pauses of 5, 10, 20 ms and so on.
        let steps = (3..2000).filter(|n| one.judge(at(n * 500), window, half, true, free)).count();
        assert!((5..10).contains(&steps), "{steps}");
        // A free processor makes it quick again.
        assert!(!one.judge(at(2_000_000), window, Duration::ZERO, true, free));
        assert!(one.judge(at(3_000_000), window, window, true, free));
        assert!(one.judge(at(3_005_000), window, window, true, free));
        // Without a processor to go to it stays, and goes as soon as there is one.
        assert!(!one.judge(at(4_000_000), window, window, true, || false));
        assert!(one.judge(at(4_000_500), window, window, true, free));
        // Windows count for the other one only if there was one in each.
        assert!(!other.judge(at(5_000_000), window, half, false, free));
        assert!(!other.judge(at(5_000_500), window, half, false, free));
        assert!(!other.judge(at(5_001_000), window, half, false, || false));
        assert!(!other.judge(at(5_001_500), window, half, false, free));
        assert!(!other.judge(at(5_002_000), window, half, false, free));
        assert!(other.judge(at(5_002_500), window, half, false, free));
    }

    #[test]
    fn the_kernel_tells_a_thread_how_long_it_has_waited_for_its_processor() {
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let wait = ProcessorWait::new();
        let Some(before) = wait.waited() else {
            eprintln!("SKIPPED: the kernel keeps no account of what threads wait for (/proc/thread-self/schedstat)");
            return;
        };
        let allowed = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set(processor());
        sched_setaffinity(None, &one).unwrap();
        let stop = AtomicBool::new(false);
        let waited = std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            // A thread may run where the one may that makes it.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let begin = Instant::now();
            loop {
                std::thread::yield_now();
                let waited = Duration::from_nanos(wait.waited().unwrap() - before);
                if waited >= WINDOW || begin.elapsed() > Duration::from_secs(120) {
                    break waited;
                }
            }
        });
        sched_setaffinity(None, &allowed).unwrap();
        assert!(waited >= WINDOW, "counted within two minutes: {waited:?}");
    }

    #[test]
    fn two_threads_are_parted_once_and_in_vain_less_and_less_often() {
        let free = || true;
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let mut parting = KeepApart::default();
        assert!(!parting.judge(true, at(0), || false));
        assert!(parting.judge(true, at(10), free) && !parting.judge(true, at(20), free));
        assert!(!parting.judge(false, at(6_000), free) && parting.judge(true, at(6_000), free));
        // Pauses of 5, 10, 20 ms and so on where a step does not part them.
        let steps = (20..2000).filter(|n| parting.judge(true, at(n * 500), free)).count();
        assert!((5..10).contains(&steps), "{steps}");
        // Once they were apart, the pauses are short again.
        assert!(!parting.judge(false, at(3_000_000), free));
        assert!(parting.judge(true, at(3_000_000), free) && parting.judge(true, at(3_005_000), free));
    }
}
