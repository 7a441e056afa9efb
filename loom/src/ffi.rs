//! The table behind the C ABI's handles.

#[path = "../../src/ffi/table.rs"]
mod table;

use loom::sync::Arc;
use loom::thread;
use table::{FIRST, NumberTable};

use crate::sync::{AtomicUsize, RwLock};

fn table() -> Arc<NumberTable<Arc<u32>>> {
    Arc::new(NumberTable::from(RwLock::new(None), AtomicUsize::new(FIRST)))
}

/// Two threads that make handles get different ones.
#[test]
fn numbers_are_given_out_once() {
    loom::model(|| {
        let table = table();
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.insert(Arc::new(1)))
        };
        let mine = table.insert(Arc::new(2));
        let theirs = other.join().unwrap();
        assert_ne!(mine, theirs);
        let value = |number| table.look(number, |thing| thing.map(|thing| **thing));
        assert_eq!((value(mine), value(theirs)), (Some(2), Some(1)));
    });
}

/// Of two threads that free a handle one does, and a call that found the object keeps it.
#[test]
fn a_handle_is_taken_once_and_a_call_keeps_its_object() {
    loom::model(|| {
        let table = table();
        let number = table.insert(Arc::new(5));
        let take = move |table: &NumberTable<Arc<u32>>| table.take(number, |thing| thing.cloned().ok_or(())).is_ok();
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || take(&table))
        };
        let in_use = table.look(number, |thing| thing.cloned());
        let mine = take(&table);
        let theirs = other.join().unwrap();
        assert!(mine != theirs, "taken once");
        assert!(in_use.is_none_or(|object| *object == 5));
        assert!(table.look(number, |thing| thing.is_none()));
    });
}
