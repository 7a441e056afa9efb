//! Unit tests of what `loom/` builds too, with types that work in its models only.

use std::time::{Duration, Instant};

use super::callers::{ASK_EVERY, Callers, MANY, Polled, SOME};

#[test]
fn only_who_polls_without_a_pause_drives() {
    let start = Instant::now();
    let callers = Callers::new(start);
    let at = |micros| start + Duration::from_micros(micros);
    // Once in a while.
    for round in 1..200 {
        assert_eq!(callers.poll(at(round * 60)), Polled::Nothing);
        assert!(!callers.are_polling(at(round * 60)));
    }
    let begin = 20_000;
    let polled: Vec<Polled> = (0..=MANY + ASK_EVERY + 1).map(|poll| callers.poll(at(begin + poll * 10))).collect();
    let asked: Vec<usize> = (0..polled.len()).filter(|at| polled.get(*at) == Some(&Polled::Ask)).collect();
    assert_eq!(asked, [MANY as usize + 1, (MANY + ASK_EVERY) as usize + 1]);
    for (polled, expected) in polled.iter().zip((0..).map(|poll| poll > SOME)) {
        assert_eq!(*polled != Polled::Nothing, expected);
    }
    let last = begin + (MANY + ASK_EVERY + 1) * 10;
    callers.enter();
    assert!(callers.are_polling(at(last + 999)) && !callers.are_polling(at(last + 1000)));
    // A thread that sleeps for so long finds out when it wakes.
    for (micros, left) in [(0, 1000), (999, 1), (1000, 0), (5000, 0)] {
        assert_eq!(callers.patience_left(at(last + micros)), Duration::from_micros(left));
    }
    assert_eq!(callers.poll(at(last + 10)), Polled::Drive);
    assert_eq!(callers.poll(at(last + 900)), Polled::Drive, "a short pause");
    assert_eq!(callers.poll(at(last + 1900)), Polled::Nothing, "a pause");
    assert!(!callers.are_polling(at(last + 1901)));
    callers.leave();
    assert!(!callers.drive());
}

#[test]
fn an_engine_with_something_long_to_do_is_left_alone_for_a_while() {
    let start = Instant::now();
    let callers = Callers::new(start);
    let at = |micros| start + Duration::from_micros(micros);
    (0..SOME).for_each(|poll| assert_eq!(callers.poll(at(poll)), Polled::Nothing));
    assert_eq!(callers.poll(at(SOME)), Polled::Drive);
    callers.leave_alone(at(SOME));
    assert!((1..1000).all(|micros| callers.poll(at(SOME + micros)) == Polled::Nothing));
    assert_ne!(callers.poll(at(SOME + 1000)), Polled::Nothing);
}
