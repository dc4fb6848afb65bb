"""Models, and the estimators with the faces of scikit-learn."""
