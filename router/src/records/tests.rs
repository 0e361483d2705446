//! The writer before a disk without room.

use std::path::Path;
use std::sync::Arc;

use baton_placement::policy::Mode;

use super::build::tests::material;
use super::files::{DigestFolder, RecordFiles, Rotation};
use super::recent::Recent;
use super::*;
use crate::clock::Moment;

fn writer(state: &Path) -> Writer {
    for folder in ["coefficients", "policies"] {
        std::fs::create_dir(state.join(folder)).unwrap();
    }
    let decisions = state.join("decisions");
    std::fs::create_dir(&decisions).unwrap();
    // The file of this moment, on a disk that is full.
    let file = decisions.join("19700101T000001.000000Z.jsonl");
    std::os::unix::fs::symlink("/dev/full", file).unwrap();
    let now = Moment(1_000_000);
    Writer {
        files: RecordFiles::open(decisions, Rotation::default(), now).unwrap(),
        coefficients: DigestFolder::new(state.join("coefficients")),
        policies: DigestFolder::new(state.join("policies")),
        recent: Arc::new(Recent::default()),
        clock: Clock::start(),
        learning: Arc::default(),
        metrics: Arc::new(Metrics::new()),
        complained: false,
        well: true,
    }
}

#[test]
fn a_full_disk_is_counted_said_once_and_what_happened_is_still_known() {
    let state = tempfile::tempdir().unwrap();
    let mut writer = writer(state.path());
    for lost in 1..=3 {
        writer.keep(material(Mode::Conditional, 90));
        writer.flush();
        assert_eq!(writer.metrics.record_overflow.get(), lost);
        assert!(writer.complained, "it is said until something is written");
    }
    assert!(writer.recent.find("r0-1").is_some());
    // What a record names is stored whether the record has room or not.
    let sets = std::fs::read_dir(state.path().join("coefficients"));
    assert_eq!(sets.unwrap().count(), 1);

    // There is room again: the next record is written, and the next trouble is said again.
    let now = Moment(2_000_000);
    let decisions = state.path().join("decisions");
    writer.files = RecordFiles::open(decisions, Rotation::default(), now).unwrap();
    writer.keep(material(Mode::Conditional, 90));
    writer.flush();
    assert_eq!(writer.metrics.record_overflow.get(), 3);
    assert!(!writer.complained);
}

#[test]
fn a_set_that_cannot_be_stored_does_not_cost_the_record() {
    let state = tempfile::tempdir().unwrap();
    let mut writer = writer(state.path());
    let decisions = state.path().join("decisions");
    writer.files =
        RecordFiles::open(decisions.clone(), Rotation::default(), Moment(2_000_000)).unwrap();
    std::fs::remove_dir_all(state.path().join("coefficients")).unwrap();
    writer.keep(material(Mode::Conditional, 90));
    writer.flush();
    assert!(writer.complained);
    assert_eq!(writer.metrics.record_overflow.get(), 0);
    let text = std::fs::read_to_string(decisions.join("19700101T000002.000000Z.jsonl"));
    assert_eq!(text.unwrap().lines().count(), 1);
}
