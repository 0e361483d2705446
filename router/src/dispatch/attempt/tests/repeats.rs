//! Reports that a worker makes once, made twice.

use super::*;

#[test]
fn what_is_reported_once_and_comes_twice_ends_the_run() {
    for twice in [lease(), started()] {
        let mut bench = Bench::new(Plan::Remote);
        bench.decode(reserved(16));
        bench.prefill(lease());
        bench.prefill(started());
        is_bug_of("p", &bench.prefill(twice));
    }
    for plan in [Plan::Local, Plan::Remote] {
        let mut bench = Bench::new(plan);
        bench.decode(reserved(16));
        is_bug_of("d", &bench.decode(reserved(16)));
    }
}

fn is_bug_of(worker: &str, commands: &[Command]) {
    let failure = failure(commands);
    assert_eq!(failure.class, FailureClass::Bug);
    assert_eq!(failure.worker, Some(worker.into()));
}
