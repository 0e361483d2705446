//! placeholder, replaced in the first commit that has content
