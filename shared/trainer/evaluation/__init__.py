"""Chapter 12. Evaluation of a model: bits per byte, multiple choice by likelihood, exact match and pass@k, and an adapter for lm-eval."""
