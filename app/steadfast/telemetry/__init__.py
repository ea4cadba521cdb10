"""Records of a run that its workers write: recorder, trackers and console."""
