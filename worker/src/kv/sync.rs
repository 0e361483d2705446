//! Taking the locks that threads of a worker share. In test builds a checker may let another thread run before each.

/// Takes a lock: waits until it is free. Under the checker of the tests all threads are one, so there it is tried until another
/// has given it back.
#[inline]
pub(crate) fn take<Guard>(
    wait: impl FnOnce() -> Guard,
    at_once: impl Fn() -> Option<Guard>,
) -> Guard {
    #[cfg(test)]
    if checker::is_on() {
        return checker::take(at_once);
    }
    #[cfg(not(test))]
    drop(at_once);
    wait()
}

#[cfg(test)]
pub(crate) mod checker {
    //! Runs a model, threads and all, in one order of steps after another. A step ends where a lock is taken.

    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use shuttle::scheduler::RandomScheduler;
    use shuttle::{Config, FailurePersistence, Runner};

    thread_local! {
        // The checker's threads are coroutines of the one that called it.
        static ON: Cell<bool> = const { Cell::new(false) };
    }

    pub(crate) fn is_on() -> bool {
        ON.get()
    }

    pub(super) fn take<Guard>(at_once: impl Fn() -> Option<Guard>) -> Guard {
        loop {
            shuttle::thread::yield_now();
            if let Some(guard) = at_once() {
                return guard;
            }
        }
    }

    /// Runs `model` in `orders` random orders, the same ones each time. False when it panicked in one of them.
    ///
    /// A model whose threads panic themselves leaves the others behind with what they hold: it collects what it finds and panics
    /// when they have been joined.
    ///
    /// # Errors
    /// What the model panicked with.
    pub(crate) fn holds(
        orders: usize,
        model: impl Fn() + Send + Sync + 'static,
    ) -> Result<(), String> {
        let mut config = Config::new();
        config.stack_size = 1 << 18;
        config.failure_persistence = FailurePersistence::None;
        let runner = Runner::new(RandomScheduler::new_from_seed(1, orders), config);
        ON.set(true);
        let run = catch_unwind(AssertUnwindSafe(|| runner.run(model)));
        ON.set(false);
        run.map(|_| ())
            .map_err(|panic| match panic.downcast::<String>() {
                Ok(text) => *text,
                Err(other) => format!("{:?}", other.downcast_ref::<&str>()),
            })
    }
}
