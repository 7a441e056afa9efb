//! Unit tests of what `loom/` builds too, with types that work in its models only.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use super::isolated::{Gone, Isolated};

type Counter = Rc<Cell<u64>>;

/// Two parts that share a counter.
fn pair() -> Arc<Isolated<(Counter, Counter)>> {
    let made = Isolated::new(|| {
        let counter = Rc::new(Cell::new(0));
        Ok::<_, ()>((Rc::clone(&counter), counter))
    });
    Arc::new(made.unwrap())
}

#[test]
fn threads_use_it_in_turn() {
    let pair = pair();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    pair.with(|(one, other)| {
                        let again = Rc::clone(one);
                        again.set(again.get() + 1);
                        assert_eq!(other.get(), again.get());
                    })
                    .unwrap();
                }
            });
        }
    });
    assert_eq!(pair.with(|(one, _)| (one.get(), Rc::strong_count(one))), Ok((40_000, 2)));
}

#[test]
fn who_tries_does_not_wait_and_finds_nothing_behind_the_end() {
    let pair = pair();
    let found = pair.with(|_| std::thread::scope(|scope| scope.spawn(|| pair.try_with(|_| ())).join().unwrap()));
    assert_eq!(found, Ok(None));
    assert_eq!(pair.try_with(|(one, _)| one.get()), Some(0));
    assert_eq!(pair.end(|(one, _)| Rc::strong_count(&one)), Ok(2));
    assert_eq!((pair.with(|_| ()), pair.try_with(|_| ())), (Err(Gone::Ended), None));
}

#[test]
fn behind_a_panic_it_can_only_be_dropped() {
    let pair = pair();
    let other = Arc::clone(&pair);
    let panicked = std::thread::spawn(move || other.with(|_| panic!("this panic is the test's"))).join();
    assert!(panicked.is_err());
    assert_eq!((pair.with(|_| ()), pair.try_with(|_| ())), (Err(Gone::Broken), None));
    pair.clear();
    pair.clear();
}
