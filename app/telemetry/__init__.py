"""What a run says about itself: measured by the leader, kept by trackers, narrated by the driver."""
