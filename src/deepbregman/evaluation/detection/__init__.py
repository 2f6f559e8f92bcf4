"""Object detection on Pascal VOC: a trained encoder as the trunk of a Faster R-CNN."""
