"""The pre-process stage, which turns texts into token ids and images into pixels."""
